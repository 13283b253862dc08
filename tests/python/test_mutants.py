"""tests/mutants/faults.toml fits the sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import mutants

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def faults() -> list[mutants.Fault]:
    return mutants.read_faults()


def test_each_text_stands_once_in_its_file(faults: list[mutants.Fault]) -> None:
    assert mutants.problems(faults) == []
    assert len(faults) >= 60


def test_the_tree_has_every_fault_behind_its_switch(
    faults: list[mutants.Fault], tmp_path: Path
) -> None:
    mutants.make_tree(faults, tmp_path)
    texts = {fault.file: (tmp_path / fault.file).read_text() for fault in faults}
    for fault in faults:
        assert texts[fault.file].count(f"mutant({fault.number}ul)") >= 1, fault.name
    assert len({fault.number for fault in faults}) == len(faults)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    mutants.make_tree(faults, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


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
