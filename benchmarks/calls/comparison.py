"""Rows of several competitors side by side, and figures as text. All tables of calls use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .call_rows import Row
from .cases import ALL_OPS, Case

OURS = "smddp"
FROM_TORCH = f"{OURS}-torch"
YARDSTICKS = ("copy", "fake", "sockets")  # not libraries that a program could use

ByCase = dict[Case, dict[str, Row]]


def by_case(rows: Iterable[Row]) -> ByCase:
    """Rows of one setting: case -> competitor -> row, sorted by operation, type and size."""
    found: ByCase = {}
    for row in sorted(rows, key=lambda r: (ALL_OPS.index(r.op), r.dtype, r.bytes)):
        found.setdefault(Case(row.op, row.dtype, row.bytes), {})[row.competitor] = row
    return found


def competitors(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.competitor for row in rows))


def best_peer(found: dict[str, Row]) -> Row | None:
    peers = [row for name, row in found.items() if not name.startswith((OURS, *YARDSTICKS))]
    return min(peers, key=lambda row: row.median_us, default=None)


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.median_us:,.0f}" if row.median_us >= 100 else f"{row.median_us:.3g}"


def percent(part: float | None, digits: int = 1) -> str:
    return "-" if part is None else f"{100 * part:.{digits}f} %"


def ratio(one: Row | None, other: Row | None) -> str:
    """Of their times."""
    return f"{one.median_us / other.median_us:.2f}" if one and other else ""


def line(cells: Sequence[str]) -> str:
    """Of a Markdown table."""
    return f"| {' | '.join(cells)} |"
