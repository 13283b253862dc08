"""The figure of runs between hosts: utilisation over size."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .chart import (
    STYLES,
    TITLES,
    competitor_handles,
    dashed,
    dashed_handle,
    entries_per_line,
    frame,
    line,
    size_axis,
)
from .plan import OPS
from .record import Row


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Utilisation over size: a line per competitor, the practical ceiling dashed."""
    for name in STYLES:
        points = [(r.bytes, 100 * (r.utilisation or 0)) for r in rows if r.competitor == name]
        if points:
            line(axes, name, points)
    ceilings = [100 * r.utilisation / r.of_ceiling for r in rows if r.utilisation and r.of_ceiling]
    if ceilings:
        dashed(axes, statistics.median(ceilings))
    size_axis(axes, rows)
    axes.set_yticks(range(0, 101, 20))


def rate(row: Row) -> str:
    """`1gbit` -> `1 Gbit/s`."""
    return re.sub(r"^([0-9.]+)([kmg]?)bit$", lambda m: f"{m[1]} {m[2].upper()}bit/s", row.rate)


def setting(rows: Sequence[Row]) -> str:
    def each(values: set[str]) -> str:
        return " and ".join(sorted(values))

    hosts = each({str(row.hosts) for row in rows})
    nics = each({f"{row.nics} x {rate(row)}" if (row.nics or 1) > 1 else rate(row) for row in rows})
    return f"{hosts} emulated hosts, {nics} each way per host; {each({r.machine for r in rows})}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """One column per number of ranks per host, one row per operation that there is."""
    ops = [op for op in OPS if any(row.op == op for row in rows)]
    widths = sorted({row.ranks_per_host for row in rows})
    top = max(105.0, 105 * max(row.utilisation or 0 for row in rows))
    width = max(6.4, 0.8 + 3.3 * len(widths))
    handles = [*competitor_handles(rows), dashed_handle("practical ceiling: bulk TCP both ways")]
    legend_lines = -(-len(handles) // entries_per_line(width))
    height = 0.95 + 0.24 * legend_lines + 2.75 * len(ops)
    figure, grid = plt.subplots(
        len(ops), len(widths), figsize=(width, height), sharey=True, squeeze=False
    )
    for axes_row, op in zip(grid, ops, strict=True):
        for axes, ranks in zip(axes_row, widths, strict=True):
            found = [r for r in rows if r.op == op and r.ranks_per_host == ranks]
            if not found:
                axes.set_visible(False)
                continue
            panel(axes, found)
            axes.set_ylim(0, top)
            plural = "" if ranks == 1 else "s"
            rates = {rate(row) for row in found}
            title = f"{TITLES[op]}, {ranks} rank{plural} per host"
            if len(rates) == 1 and len({rate(row) for row in rows}) > 1:
                title += f", {rates.pop()}"
            axes.set_title(title, fontsize=10, loc="left")
        axes_row[0].set_ylabel("utilisation of the interface, %", fontsize=9)
    frame(figure, ["What collectives get out of the network", setting(rows)], handles)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
