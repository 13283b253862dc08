"""tests/mutants/faults.toml fits the sources, and docs/mutants.md is written from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import mutants
from mutants import Fault, Outcome

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def faults() -> list[Fault]:
    return mutants.read_faults()


def test_each_text_stands_once_in_its_file(faults: list[Fault]) -> None:
    assert mutants.problems(faults) == []
    assert len(faults) >= 60


def test_the_tree_has_every_fault_behind_its_switch(faults: list[Fault], tmp_path: Path) -> None:
    mutants.make_tree(faults, tmp_path)
    texts = {fault.file: (tmp_path / fault.file).read_text() for fault in faults}
    for fault in faults:
        assert texts[fault.file].count(f"mutant({fault.number}ul)") >= 1, fault.name
    assert len({fault.number for fault in faults}) == len(faults)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    mutants.make_tree(faults, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_page_is_that_of_the_list_and_the_results(faults: list[Fault]) -> None:
    text = mutants.page(faults, mutants.load())
    assert mutants.PAGE.read_text(encoding="utf-8") == text, "run tools/mutants.py --page"


def test_forms_of_a_fault() -> None:
    def switched(text: str, fault: str) -> str:
        on = mutants.Fault("n", "f", text, fault, "b")
        return on.switched().replace(f"::smddp::mutant({on.number}ul)", "ON")

    assert switched("a < b", "a <= b") == "(ON ? (a <= b) : (a < b))"
    assert switched("f();", "") == "{ if (ON) {  } else { f(); } }"
    assert switched("if (a) f();", "if (a && !$MUTANT) f();") == "if (a && !ON) f();"


def test_the_test_that_failed_is_named() -> None:
    output = b"[ RUN      ] A.B\n[       OK ] A.B (0 ms)\n[ RUN      ] A.C\n"
    assert mutants.failed_test(output, "crashes") == "A.C"
    assert mutants.failed_test(output + b"[  FAILED  ] A.C (1 ms)\n", "fails") == "A.C"
    assert mutants.failed_test(b"no test of GoogleTest", "fails") == ""


def test_unnoticed_faults_are_listed_apart() -> None:
    seen, unseen = (Fault(n, "csrc/a.cc", "x", "y", "It breaks.") for n in ("seen", "unseen"))
    text = mutants.page([seen, unseen], {"seen": Outcome("0", "p", "A.B", "fails", 1.5)})
    assert "1 of 1 faults" in text
    assert "1 more have not been tried" in text
    noticed, unnoticed = text.split("## Unnoticed")
    assert "| a.cc | seen: `x` becomes `y` | It breaks. | `A.B` fails, 1.5 s |" in noticed
    assert "| a.cc | unseen: `x` becomes `y` | It breaks. | not tried |" in unnoticed
