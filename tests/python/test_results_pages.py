"""The pages of benchmark runs have one form, and the links of the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks/results"
FOLDERS = sorted(path for path in RUNS.iterdir() if path.is_dir())
HEADINGS = (
    *("Machine", "Versions", "Commit", "Command"),
    *("Table", "Figure", "What is out of line", "Raw data"),
)
DATA = (".csv", ".json", ".log", ".txt")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "benchmarks/README.md", ROOT / "benchmarks/RESULTS.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(RUNS.rglob("*.md")),
]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of all links and images that are not on the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def headings(page: Path, level: str = "#{1,6}") -> list[str]:
    return re.findall(rf"^{level} (.+)$", prose(page), flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(page))
    return {heading.replace(" ", "-") for heading in plain}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_run_has_a_page_of_the_form_and_raw_data(folder: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9.-]+", folder.name), "<date>-<what>"
    page = folder / "README.md"
    assert page.is_file(), "benchmarks/results/README.md describes the page that is missing here"
    assert tuple(headings(page, "##")) == HEADINGS
    files = sorted(path.name for path in folder.iterdir() if path != page)
    assert any(file.endswith(DATA) for file in files), "no raw data"
    unnamed = [file for file in files if file not in links(page)]
    assert not unnamed, "the page does not link to these files"
    assert f"{folder.name}/README.md" in links(RUNS / "README.md"), "the index lacks the run"


def test_every_file_of_a_run_is_in_its_folder() -> None:
    assert [path.name for path in RUNS.iterdir() if path.is_file()] == ["README.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
