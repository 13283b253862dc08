"""docs/dev/one-allgather.md names files, classes and functions that exist, on a straight way."""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "tools"))
from check_import_rules import FOLDERS  # noqa: E402

PAGE = ROOT / "docs" / "dev" / "one-allgather.md"

ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \| .+ \|$", re.MULTILINE)
QUALIFIED = re.compile(r"\b([A-Z]\w+)::(~?\w+)")


@cache
def core() -> dict[str, str]:
    """Every source file of csrc, without comments."""
    files = (p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cc", ".cu"})
    return {p.relative_to(ROOT).as_posix(): re.sub(r"//[^\n]*", "", p.read_text()) for p in files}


def body_of(cls: str, text: str) -> str | None:
    """What stands between the braces of the class, if `text` defines it."""
    begin = re.search(rf"\b(?:class|struct)\s+{cls}\b[^;{{(]*\{{", text)
    if begin is None:
        return None
    depth, at = 1, begin.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[begin.end() : at]


def declares(cls: str, function: str) -> bool:
    """Whether a class of that name, or one of its bases, has that function."""
    for text in core().values():
        body = body_of(cls, text)
        if body is None:
            continue
        if re.search(rf"(?<!\w){re.escape(function)}\s*\(", body):
            return True
        bases = re.search(rf"\bclass\s+{cls}\b[^{{]*?:([^{{]*)\{{", text)
        if bases and any(declares(b, function) for b in re.findall(r"\b[A-Z]\w+", bases[1])):
            return True
    return False


def defines(file: str, name: str) -> bool:
    """Whether the file holds the body of the function `name`."""
    text = core()[file]
    cls, _, function = name.rpartition("::")
    inside = (body_of(cls, text) or "") if cls else text
    body = r"\([^;{}]*\)\s*(?:const\s*)?(?:noexcept\s*)?(?:override\s*)?(?::[^;{}]*)?\{"
    return bool(
        re.search(rf"(?<!\w){re.escape(name)}{body}", text)
        or re.search(rf"(?<![\w:]){re.escape(function)}{body}", inside)
    )


class Step(NamedTuple):
    """One row of a table of the page."""

    number: str
    file: str
    function: str  # with its class, if it has one

    @property
    def folder(self) -> str:
        return self.file.removeprefix("csrc/").rpartition("/")[0]


def steps(title: str) -> list[Step]:
    """The steps in the section whose heading starts with ``title``."""
    found = re.search(rf"^## {title}.*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return [Step(*row) for row in ROW.findall(found[0])]


DOWN, BACK, INSIDE = steps("Down"), steps("Back"), steps("Inside")


def test_the_page_has_its_tables() -> None:
    assert DOWN and BACK and INSIDE
    assert [s.number for s in (*DOWN, *BACK)] == [str(i + 1) for i in range(len(DOWN) + len(BACK))]


@pytest.mark.parametrize("step", [*DOWN, *BACK, *INSIDE], ids=lambda s: f"{s.number} {s.function}")
def test_a_step_is_where_the_page_says(step: Step) -> None:
    assert step.file in core(), step.file
    assert defines(step.file, step.function)


def test_every_name_on_the_page_exists() -> None:
    text = PAGE.read_text()
    missing = [
        f"{cls}::{function}"
        for cls, function in QUALIFIED.findall(text)
        if not declares(cls, function)
    ]
    assert not missing
    files = re.findall(r"\b(?:csrc|deepspeed_smddp|tests|docs|tools)/[\w./-]*\w", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_way_down_never_goes_up_and_the_way_back_never_goes_down() -> None:
    for way in (DOWN, BACK[::-1]):
        for a, b in pairwise(way):
            # A folder within one that may be included implements its interface.
            allowed = (a.folder, *FOLDERS[a.folder].split())
            assert b.folder in allowed or b.folder.rpartition("/")[0] in allowed, (a, b)


def test_folders_are_drawn_above_those_they_include() -> None:
    text = (PAGE.parent / "README.md").read_text()
    drawing = text[text.index("## The folders of the core") :].split("```")[1]
    rows = [re.findall(r"([a-z/]+)/(?= )", line) for line in drawing.splitlines()]
    height = {folder: -row for row, folders in enumerate(rows) for folder in folders}
    for folder in height:
        assert all(height[below] < height[folder] for below in FOLDERS[folder].split()), folder
