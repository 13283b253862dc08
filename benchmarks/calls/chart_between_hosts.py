"""The figure of runs between hosts: utilisation over size."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from shared.chart import STYLES, dashed, dashed_handle, save

from .call_rows import Row
from .chart_parts import TITLES, competitor_handles, each, line, panel_grid


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Utilisation over size: a line per competitor, the practical ceiling dashed."""
    for name in STYLES:
        points = [(r.bytes, 100 * (r.utilisation or 0)) for r in rows if r.competitor == name]
        if points:
            line(axes, name, points)
    ceilings = [100 * r.utilisation / r.of_ceiling for r in rows if r.utilisation and r.of_ceiling]
    if ceilings:
        dashed(axes, statistics.median(ceilings))
    axes.set_yticks(range(0, 101, 20))


def rate(row: Row) -> str:
    """`1gbit` -> `1 Gbit/s`."""
    return re.sub(r"^([0-9.]+)([kmg]?)bit$", lambda m: f"{m[1]} {m[2].upper()}bit/s", row.rate)


def setting(rows: Sequence[Row]) -> str:
    hosts = each({str(row.hosts) for row in rows})
    nics = each({f"{row.nics} x {rate(row)}" if (row.nics or 1) > 1 else rate(row) for row in rows})
    return f"{hosts} emulated hosts, {nics} each way per host; {each({r.machine for r in rows})}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """One column per number of ranks per host, one row per operation in ``rows``."""
    top = max(105.0, 105 * max(row.utilisation or 0 for row in rows))
    several_rates = len({rate(row) for row in rows}) > 1
    handles = [*competitor_handles(rows), dashed_handle("practical ceiling: bulk TCP both ways")]

    def draw_panel(axes: Axes, found: Sequence[Row]) -> str:
        panel(axes, found)
        axes.set_ylim(0, top)
        ranks, rates = found[0].ranks_per_host, {rate(row) for row in found}
        title = f"{TITLES[found[0].op]}, {ranks} rank{'' if ranks == 1 else 's'} per host"
        return f"{title}, {rates.pop()}" if several_rates and len(rates) == 1 else title

    figure = panel_grid(
        rows,
        columns=sorted({row.ranks_per_host for row in rows}),
        column_of=lambda row: row.ranks_per_host,
        handles=handles,
        panel_size=(3.3, 2.75),
        draw_panel=draw_panel,
        y_label="utilisation of the interface, %",
    )
    save(figure, path, ["Network utilisation of collectives", setting(rows)], handles)
