"""The planner against published training speeds: the marks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepspeed_smddp.planning.constants import values
from harness import modules

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from planning import fitting, validation_page  # noqa: E402

COVERED, LEFT = fitting.covered()
ERRORS = {row.number: (row, fitting.error(row, job, values())) for row, job in COVERED}


def test_every_row_is_predicted_or_has_a_reason() -> None:
    assert len(COVERED) + len(LEFT) == 272
    assert len(COVERED) >= 250
    assert all(why for _, why in LEFT)


def test_a_third_of_the_rows_is_fitted() -> None:
    assert sum(row.fitted for row, _ in COVERED) <= len(COVERED) / 3


def test_held_out_rows() -> None:
    held = [error for row, error in ERRORS.values() if not row.fitted]
    assert validation_page.median(held) <= 0.08
    assert validation_page.within(held, 0.2) >= 0.9


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 7, 8])
def test_the_closed_librarys_rows(number: int) -> None:
    row, error = ERRORS[number]
    assert row.closed_library
    assert abs(error) <= 0.15


# ---- against the steps that were measured on emulated hosts


def test_the_median_error_on_emulated_hosts() -> None:
    command = modules.load("benchmarks/planner_emulated.py")
    found = command.steps()
    assert len({step.kind for step in found}) >= 9
    assert command.median_error(found) <= 0.08
