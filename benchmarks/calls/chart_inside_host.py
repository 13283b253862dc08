"""The figure of runs inside one host: time over size, in multiples of the bare copy's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from shared.chart import STYLES, dashed, dashed_handle, save

from .call_rows import Row
from .chart_parts import TITLES, competitor_handles, each, line, operations, panel_grid

YARDSTICK = "copy"


def units(rows: Sequence[Row]) -> dict[int, float]:
    """By size, the time that counts as 1: of the bare copy, otherwise of the fastest competitor."""
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
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw(rows: Sequence[Row], path: Path) -> None:
    """One row per operation, one column per type and number of ranks."""
    ops = operations(rows)
    shown = [row for row in rows if row.op in ops and row.competitor in STYLES]
    has_copy = any(row.competitor == YARDSTICK for row in shown)
    handles = [
        *competitor_handles([row for row in shown if row.competitor != YARDSTICK]),
        dashed_handle("bare copy, buffers mapped" if has_copy else "the fastest"),
    ]

    def draw_panel(axes: Axes, found: Sequence[Row]) -> str:
        panel(axes, found)
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
