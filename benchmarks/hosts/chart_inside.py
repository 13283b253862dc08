"""The figure of runs inside one host: time over size, as a multiple of the bare copy's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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

YARDSTICK = "copy"


def units(rows: Sequence[Row]) -> dict[int, float]:
    """By size, what counts as 1: the bare copy's time, or else that of the fastest."""
    out: dict[int, float] = {}
    for size in {row.bytes for row in rows}:
        here = [row for row in rows if row.bytes == size]
        copies = [row.median_us for row in here if row.competitor == YARDSTICK]
        out[size] = copies[0] if copies else min(row.median_us for row in here)
    return out


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    unit = units(rows)
    for name in STYLES:
        points = [(r.bytes, r.median_us / unit[r.bytes]) for r in rows if r.competitor == name]
        if points and name != YARDSTICK:
            line(axes, name, points)
    dashed(axes, 1)
    size_axis(axes, rows)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw(rows: Sequence[Row], path: Path) -> None:
    """One row per operation, one column per type and number of ranks."""
    ops = [op for op in OPS if any(row.op == op for row in rows)]
    columns = sorted(
        {(row.ranks_per_host, row.dtype) for row in rows}, key=lambda c: (c[0], c[1] != "fp32")
    )
    shown = [row for row in rows if row.op in ops and row.competitor in STYLES]
    has_copy = any(row.competitor == YARDSTICK for row in shown)
    handles = [
        *competitor_handles([row for row in shown if row.competitor != YARDSTICK]),
        dashed_handle("bare copy, buffers mapped" if has_copy else "the fastest"),
    ]
    width = max(6.4, 0.8 + 3.6 * len(columns))
    legend_lines = -(-len(handles) // entries_per_line(width))
    height = 0.95 + 0.24 * legend_lines + 3.0 * len(ops)
    figure, grid = plt.subplots(
        len(ops), len(columns), figsize=(width, height), sharey=True, squeeze=False
    )
    for axes_row, op in zip(grid, ops, strict=True):
        for axes, (ranks, dtype) in zip(axes_row, columns, strict=True):
            case = (op, ranks, dtype)
            found = [r for r in shown if (r.op, r.ranks_per_host, r.dtype) == case]
            if not found:
                axes.set_visible(False)
                continue
            panel(axes, found)
            title = f"{TITLES[op]}, {dtype}, {ranks} ranks"
            if has_copy and all(row.competitor != YARDSTICK for row in found):
                title += ", 1: the fastest"
            axes.set_title(title, fontsize=10, loc="left")
        axes_row[0].set_ylabel("time / bare copy" if has_copy else "time / fastest", fontsize=9)
    machines = " and ".join(sorted({row.machine for row in rows}))
    frame(figure, ["Collectives inside one host", f"lower is better; {machines}"], handles)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
