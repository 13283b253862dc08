"""Rows as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from .plan import Case
from .record import Row


def by_case(rows: list[Row]) -> dict[Case, dict[str, Row]]:
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(Case(row.op, row.dtype, row.bytes), {})[row.competitor] = row
    return found


def table(rows: list[Row]) -> Table:
    """Per case: microseconds and, in brackets, the utilisation in per cent, of every competitor."""
    names = list(dict.fromkeys(row.competitor for row in rows))
    out = Table("operation", "type", "bytes", *names, "wire ratio", "drops")
    for column in out.columns[2:]:
        column.justify = "right"
    for case, found in by_case(rows).items():
        cells = [
            f"{row.median_us:,.0f} ({100 * row.utilisation:.0f} %)" if (row := found.get(n)) else ""
            for n in names
        ]
        wire = " ".join(f"{found[n].wire_ratio:.2f}" for n in names if n in found)
        drops = " ".join(f"{found[n].drops}" for n in names if n in found)
        out.add_row(case.op, case.dtype, f"{case.bytes:,}", *cells, wire, drops)
    return out
