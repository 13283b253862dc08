"""The figures of calls: utilisation over size between hosts, time over size inside one host.

Both have a row of panels per operation, sizes on the axis, and one legend.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)
from shared.chart import STYLES, dashed, dashed_handle, legend_lines, light_grid, save

from .call_rows import Row
from .cases import OPS

TITLES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
SUBJECT = {
    "all_gather": "AllGather output",
    "reduce_scatter": "ReduceScatter input",
    "all_reduce": "AllReduce buffer",
}

YARDSTICK = "copy"

_Column = TypeVar("_Column")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Of the rows between hosts; if there are none, of those inside one host."""
    between = [row for row in rows if row.utilisation is not None]
    if between:
        draw_between_hosts(between, path)
    else:
        draw_inside_host(rows, path)


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


def utilisation_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Utilisation over size: a line per competitor, the practical ceiling dashed."""
    for name in STYLES:
        of_size: dict[int, list[float]] = {}  # one for each type
        for row in rows:
            if row.competitor == name:
                of_size.setdefault(row.bytes, []).append(100 * (row.utilisation or 0))
        if of_size:
            line(axes, name, [(size, statistics.mean(of)) for size, of in of_size.items()])
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
    types = {row.dtype for row in rows}
    types_text = f"; mean of {each(types)}" if len(types) > 1 else ""
    machines = each({row.machine for row in rows})
    return f"{hosts} emulated hosts, {nics} each way per host{types_text}; {machines}"


def draw_between_hosts(rows: Sequence[Row], path: Path) -> None:
    """One column per number of hosts and of ranks per host, one row per operation in ``rows``."""
    top = max(105.0, 105 * max(row.utilisation or 0 for row in rows))
    several_rates = len({rate(row) for row in rows}) > 1
    handles = [*competitor_handles(rows), dashed_handle("practical ceiling: bulk TCP both ways")]

    def draw_panel(axes: Axes, found: Sequence[Row]) -> str:
        utilisation_panel(axes, found)
        axes.set_ylim(0, top)
        rates = {rate(row) for row in found}
        title = f"{TITLES[found[0].op]}, {found[0].hosts} x {found[0].ranks_per_host} ranks"
        return f"{title}, {rates.pop()}" if several_rates and len(rates) == 1 else title

    figure = panel_grid(
        rows,
        columns=sorted({(row.hosts, row.ranks_per_host) for row in rows}),
        column_of=lambda row: (row.hosts, row.ranks_per_host),
        handles=handles,
        panel_size=(3.3, 2.75),
        draw_panel=draw_panel,
        y_label="utilisation of the interface, %",
    )
    save(figure, path, ["Network utilisation of collectives", setting(rows)], handles)


def units(rows: Sequence[Row]) -> dict[int, float]:
    """By size, the time that counts as 1: of the bare copy, otherwise of the fastest competitor."""
    out: dict[int, float] = {}
    for size in {row.bytes for row in rows}:
        here = [row for row in rows if row.bytes == size]
        copies = [row.median_us for row in here if row.competitor == YARDSTICK]
        out[size] = copies[0] if copies else min(row.median_us for row in here)
    return out


def time_panel(axes: Axes, rows: Sequence[Row]) -> None:
    unit = units(rows)
    for name in STYLES:
        points = [(r.bytes, r.median_us / unit[r.bytes]) for r in rows if r.competitor == name]
        if points and name != YARDSTICK:
            line(axes, name, points)
    dashed(axes, 1)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_inside_host(rows: Sequence[Row], path: Path) -> None:
    """Time in multiples of the bare copy's: a row per operation, a column per type and ranks."""
    ops = operations(rows)
    shown = [row for row in rows if row.op in ops and row.competitor in STYLES]
    has_copy = any(row.competitor == YARDSTICK for row in shown)
    handles = [
        *competitor_handles([row for row in shown if row.competitor != YARDSTICK]),
        dashed_handle("bare copy, buffers mapped" if has_copy else "the fastest"),
    ]

    def draw_panel(axes: Axes, found: Sequence[Row]) -> str:
        time_panel(axes, found)
        title = f"{TITLES[found[0].op]}, {found[0].dtype}, {found[0].ranks_per_host} ranks"
        lacks_copy = has_copy and all(row.competitor != YARDSTICK for row in found)
        return f"{title}, 1: the fastest" if lacks_copy else title

    figure = panel_grid(
        shown,
        columns=sorted(
            {(row.ranks_per_host, row.dtype) for row in rows}, key=lambda c: (c[0], c[1] != "fp32")
        ),
        column_of=lambda row: (row.ranks_per_host, row.dtype),
        handles=handles,
        panel_size=(3.6, 3.0),
        draw_panel=draw_panel,
        y_label="time / bare copy" if has_copy else "time / fastest",
    )
    machines = each({row.machine for row in rows})
    save(figure, path, ["Collectives inside one host", f"lower is better; {machines}"], handles)
