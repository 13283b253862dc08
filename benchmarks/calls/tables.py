"""Rows as tables: one for the terminal, and those in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from . import tables_between_hosts, tables_inside_host, tables_of_builds
from .call_rows import Row
from .comparison import OURS, by_case, competitors, microseconds, percent


def terminal_table(rows: Sequence[Row]) -> Table:
    """Per case the microseconds of all competitors; with links, also the utilisation of smddp."""
    names = competitors(rows)
    networked = any(row.utilisation is not None for row in rows)
    ours = [name for name in names if name.startswith(OURS) and networked]
    out = Table("operation", "type", "bytes", *(f"{n} us" for n in names), box=None, pad_edge=False)
    for name in ours:
        out.add_column(f"{name} util")
    if networked:
        out.add_column("drops")
    for column in out.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    out.columns[0].no_wrap = True
    for case, found in by_case(rows).items():
        cells = [microseconds(found.get(n)) for n in names]
        cells += [percent(row.utilisation, 0) if (row := found.get(n)) else "" for n in ours]
        if networked:
            cells.append(f"{sum(row.drops or 0 for row in found.values())}")
        out.add_row(case.op, case.dtype, f"{case.bytes:,}", *cells)
    return out


def markdown(rows: Sequence[Row]) -> str:
    """The tables of each setting; see `tables_inside_host` and `tables_between_hosts`."""
    settings: dict[tuple[int, int, str, int | None], list[Row]] = {}
    for row in rows:
        key = (row.hosts, row.ranks_per_host, row.rate, row.nics)
        settings.setdefault(key, []).append(row)
    lines: list[str] = []
    for (hosts, ranks, rate, nics), here in sorted(settings.items(), key=lambda item: item[0]):
        if rate:
            title = f"{hosts} hosts x {ranks} ranks, {nics} x {rate}"
            found = tables_between_hosts.tables(here)
        else:
            by_name = f"{hosts} x {ranks} ranks by name"
            title = f"{ranks} ranks on one host" if hosts == 1 else by_name
            found = tables_inside_host.tables(here)
        lines += [f"### {title}", "", *found, ""]
        if builds := tables_of_builds.markdown(here):
            lines += [*builds, ""]
    return "\n".join(lines)
