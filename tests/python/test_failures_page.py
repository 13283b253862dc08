"""docs/failures.md has the table of the promises that tests/fault/test_matrix.py tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from draw_failures import PAGE, page


def test_the_table_is_that_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run tools/draw_failures.py"
