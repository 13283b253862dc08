"""Writes the table of promises into docs/failures.md, from tests/fault/test_matrix.py.

python tools/draw_failures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


def table() -> str:
    """What is promised for each fault, way and phase, and the number of cells."""
    sys.path[:0] = [str(ROOT / "tests" / "fault"), str(ROOT / "tests" / "python")]
    import test_matrix as matrix

    lines = [
        f"{len(matrix.CELLS)} cells: what hits one of three ranks, when, and what the others see.",
        '`make test-faults` tests each (`tests/fault/test_matrix.py`). In the phase "part done"',
        "the rank that is hit has done its part of an operation, which the others finish.",
        "",
        "| fault | way | " + " | ".join(matrix.PHASES) + " |",
        "|---" * (len(matrix.PHASES) + 2) + "|",
    ]
    for fault in matrix.FAULTS:
        ways: dict[tuple[str, ...], list[str]] = {}
        for way in matrix.WAYS:
            promises = [matrix.promise(phase, fault, way) for phase in matrix.PHASES]
            row = tuple(promise.text if promise else "" for promise in promises)
            if any(row):
                ways.setdefault(row, []).append(way.name)
        for row, names in ways.items():
            which = "all" if len(names) == len(matrix.WAYS) else ", ".join(names)
            lines.append(f"| {fault} | {which} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
