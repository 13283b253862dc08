"""Benchmarks of two builds in one run: the comparison, the checks of the other build, the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def row(competitor: str, turns: list[float]) -> Any:
    from calls.call_rows import Row

    median = sorted(turns)[len(turns) // 2]
    where = {"hosts": 1, "ranks_per_host": 2, "rate": "", "nics": None}
    figures = {"median_us": median, "min_us": min(turns), "p90_us": 0.0, "cpu_us": 0.0}
    links = {"utilisation": None, "of_ceiling": None, "wire_ratio": None, "drops": None}
    return Row(
        date="",
        machine="",
        versions="",
        op="all_gather",
        dtype="bf16",
        bytes=4096,
        competitor=competitor,
        version="",
        iterations=1,
        turns=len(turns),
        turns_us=" ".join(str(turn) for turn in turns),
        **where,
        **figures,
        **links,
    )


@pytest.mark.parametrize(
    ("this", "other", "verdict"),
    [
        ([11.0, 12.0, 13.0], [8.0, 9.0, 10.0], "slower"),
        ([8.0, 9.0, 10.0], [11.0, 12.0, 13.0], "faster"),
        ([8.0, 9.0, 12.0], [11.0, 12.0, 13.0], "no"),
    ],
)
def test_builds_differ_beyond_the_spread_if_all_turns_do(
    this: list[float], other: list[float], verdict: str
) -> None:
    from calls import tables_of_builds

    cells = tables_of_builds.lines_of([row("smddp", this), row("smddp-other", other)])
    ratios = sorted(a / b for a, b in zip(this, other, strict=True))
    shown = [f"{figure:.3f}" for figure in (this[1] / other[1], *ratios)]
    assert cells == [
        [
            *("all_gather", "bf16", "4,096", "smddp"),
            *(f"{this[1]:.3g}", f"{other[1]:.3g}", *shown, verdict),
        ]
    ]


def test_only_competitors_of_both_builds_are_compared() -> None:
    from calls import tables_of_builds

    assert tables_of_builds.markdown([row("smddp", [1.0]), row("gloo", [2.0])]) == []


def test_rows_of_older_files_have_no_times_of_turns(tmp_path: Path) -> None:
    from calls.call_rows import Row
    from calls.tables_of_builds import turn_by_turn
    from shared import csv_rows

    path = tmp_path / "rows.csv"
    csv_rows.write(path, [row("smddp", [1.5, 2.5])])
    assert csv_rows.read(Row, path)[0].times() == [1.5, 2.5]
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    assert csv_rows.read(Row, path)[0].times() == []
    assert turn_by_turn([], [1.0]) == ["", "", "", ""]


def test_the_other_build_must_be_there_and_be_its_own(tmp_path: Path) -> None:
    from shared.build import imported_tree, other_build

    build = other_build(tmp_path)
    assert "core_collectives is not built; `make bench-programs`" in (build.missing_core() or "")
    assert "does not exist" in (build.missing_package() or "")
    build.python.parent.mkdir(parents=True)
    build.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    build.python.chmod(0o755)
    found = f"imports deepspeed_smddp from {imported_tree()}, not from"
    assert found in (build.missing_package() or "")


def test_the_page_of_a_run_has_the_form_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shared.page import Origin, write_page

    monkeypatch.setattr(sys, "argv", ["benchmarks/collectives.py", "--ranks", "2"])
    origin = Origin("a machine", "versions", "a commit")
    first = write_page(tmp_path, "2-ranks", "Title", origin, "| table |")
    second = write_page(tmp_path, "4-ranks", "Title", origin, "| table |")
    assert [first.name, second.name] == ["README.md", "4-ranks.md"]
    text = first.read_text()
    assert "python benchmarks/collectives.py --ranks 2" in text
    form = (ROOT / "benchmarks/results/README.md").read_text()
    wanted = re.findall(r"^\| ([A-Z][^|]*) \| ", form.partition("## The form")[2], re.MULTILINE)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == wanted
