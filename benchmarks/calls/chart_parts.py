"""What the figures of calls share: one row of panels per operation, sizes on the axis, legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from shared.chart import STYLES, legend_lines, light_grid

from .call_rows import Row
from .cases import OPS

TITLES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
SUBJECT = {
    "all_gather": "AllGather output",
    "reduce_scatter": "ReduceScatter input",
    "all_reduce": "AllReduce buffer",
}

_Column = TypeVar("_Column")


def operations(rows: Sequence[Row]) -> list[str]:
    return [op for op in OPS if any(row.op == op for row in rows)]


def panel_grid(
    rows: Sequence[Row],
    columns: Sequence[_Column],
    column_of: Callable[[Row], _Column],
    handles: Sequence[Line2D],
    panel_size: tuple[float, float],
    draw_panel: Callable[[Axes, Sequence[Row]], str],
    y_label: str,
) -> Figure:
    """A row of panels per operation; ``draw_panel`` draws the rows of one and returns its title."""
    ops = operations(rows)
    width = max(6.4, 0.8 + panel_size[0] * len(columns))
    height = 0.95 + 0.24 * legend_lines(handles, width) + panel_size[1] * len(ops)
    figure, grid = plt.subplots(
        len(ops), len(columns), figsize=(width, height), sharey=True, squeeze=False
    )
    for axes_row, op in zip(grid, ops, strict=True):
        for axes, column in zip(axes_row, columns, strict=True):
            found = [row for row in rows if row.op == op and column_of(row) == column]
            if found:
                axes.set_title(draw_panel(axes, found), fontsize=10, loc="left")
                size_axis(axes, found)
            else:
                axes.set_visible(False)
        axes_row[0].set_ylabel(y_label, fontsize=9)
    return figure


def size_text(size: float, _: object = None) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def size_axis(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    # Labels at powers of 16; the markers show the sizes that were measured.
    first, last = sizes[0], sizes[-1]
    ticks = [1 << e for e in range(6, 41, 4) if first / 2 <= 1 << e <= last * 2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size_text))
    axes.set_xlabel(SUBJECT[rows[0].op], fontsize=9)
    axes.tick_params(labelsize=8)
    light_grid(axes)


def line(axes: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
    """The figures of one competitor over the sizes."""
    colour, marker, _ = STYLES[name]
    ours = name.startswith("smddp")
    axes.plot(
        *zip(*sorted(points), strict=True),
        color=colour,
        marker=marker,
        markersize=5 if ours else 4.5,
        linewidth=2.4 if ours else 1.3,
        zorder=3 if ours else 2,
    )


def competitor_handles(rows: Sequence[Row]) -> list[Line2D]:
    """Entries of the legend."""
    handles = []
    for name in (n for n in STYLES if any(row.competitor == n for row in rows)):
        colour, marker, label = STYLES[name]
        if all(row.hosts == 1 for row in rows):
            label = label.partition(", lib")[0]  # the network library does not matter in one host
        width = 2.4 if name.startswith("smddp") else 1.3
        handles.append(
            Line2D([], [], color=colour, marker=marker, linewidth=width, markersize=5, label=label)
        )
    return handles


def each(values: set[str]) -> str:
    return " and ".join(sorted(values))
