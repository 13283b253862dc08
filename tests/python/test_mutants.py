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
