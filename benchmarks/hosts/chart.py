"""What the figures share: how competitors look, sizes on the axis, legend, title."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .record import Row

# A colour and a marker belong to a competitor, whichever others are drawn (Okabe and Ito's colours,
# which the colour-blind tell apart). Ours are the thick ones.
STYLES: dict[str, tuple[str, str, str]] = {
    "smddp": ("#d55e00", "o", "smddp"),
    "smddp-torch": ("#e69f00", "D", "smddp, from torch"),
    "smddp-shared": ("#f0a070", "h", "smddp, shared buffers"),
    "copy": ("#555555", "", "bare copy"),
    "gloo": ("#000000", "x", "Gloo"),
    "mpich": ("#0072b2", "s", "MPICH, libfabric"),
    "mpich-ucx": ("#56b4e9", "v", "MPICH, UCX"),
    "impi": ("#009e73", "^", "Intel MPI"),
    "openmpi": ("#cc79a7", "P", "Open MPI"),
    "oneccl": ("#8c8c8c", "*", "oneCCL"),
}
TITLES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
SUBJECT = {
    "all_gather": "AllGather output",
    "reduce_scatter": "ReduceScatter input",
    "all_reduce": "AllReduce buffer",
}


def size_text(size: float, _: object = None) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def line(axes: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
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


def size_axis(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    # Powers of 16, labelled; the sizes that were measured are the markers.
    first, last = sizes[0], sizes[-1]
    ticks = [1 << e for e in range(6, 41, 4) if first / 2 <= 1 << e <= last * 2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size_text))
    axes.set_xlabel(SUBJECT[rows[0].op], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def competitor_handles(rows: Sequence[Row]) -> list[Line2D]:
    handles = []
    for name in (n for n in STYLES if any(row.competitor == n for row in rows)):
        colour, marker, label = STYLES[name]
        if all(row.hosts == 1 for row in rows):
            label = label.partition(", lib")[0]  # no network, whichever way it would use one
        width = 2.4 if name.startswith("smddp") else 1.3
        handles.append(
            Line2D([], [], color=colour, marker=marker, linewidth=width, markersize=5, label=label)
        )
    return handles


def dashed(axes: Axes, y: float) -> None:
    axes.axhline(y, color="0.35", linestyle=(0, (5, 3)), linewidth=1)


def dashed_handle(label: str) -> Line2D:
    return Line2D([], [], color="0.35", linestyle=(0, (5, 3)), linewidth=1, label=label)


def entries_per_line(width: float) -> int:
    return max(2, int((width - 1.2) / 1.55))  # the last entry is the longest


def frame(figure: Figure, title: Sequence[str], handles: Sequence[Line2D]) -> None:
    """Title lines above the panels, the legend below them."""
    width, height = figure.get_size_inches()
    for i, text in enumerate(title):
        y = 1 - (0.12 + 0.24 * i) / height
        figure.text(
            0.01,
            y,
            text,
            ha="left",
            va="top",
            fontsize=11,
            fontweight="bold" if i == 0 else "normal",
        )
    columns = entries_per_line(width)
    figure.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    bottom = (0.12 + 0.24 * -(-len(handles) // columns)) / height
    figure.tight_layout(rect=(0, bottom, 1, 1 - (0.14 + 0.24 * len(title)) / height))
