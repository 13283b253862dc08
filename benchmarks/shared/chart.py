"""What all figures share: the style of each competitor, title and legend, the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# A competitor has the same colour and marker in all figures, whichever others are drawn (colours of
# Okabe and Ito, which colour-blind readers can tell apart; darker ones for another build of smddp).
# smddp has the thick lines.
STYLES: dict[str, tuple[str, str, str]] = {
    "smddp": ("#d55e00", "o", "smddp"),
    "smddp-other": ("#8b3a00", "<", "other build"),
    "smddp-torch": ("#e69f00", "D", "smddp, from torch"),
    "smddp-torch-other": ("#946600", ">", "other, from torch"),
    "smddp-shared": ("#f0a070", "h", "smddp, shared buffers"),
    "smddp-shared-other": ("#c98a66", "H", "other, shared buffers"),
    "copy": ("#555555", "", "bare copy"),
    "gloo": ("#000000", "x", "Gloo"),
    "mpich": ("#0072b2", "s", "MPICH, libfabric"),
    "mpich-ucx": ("#56b4e9", "v", "MPICH, UCX"),
    "impi": ("#009e73", "^", "Intel MPI"),
    "openmpi": ("#cc79a7", "P", "Open MPI"),
    "oneccl": ("#8c8c8c", "*", "oneCCL"),
}
DASHED = {"color": "0.35", "linestyle": (0, (5, 3)), "linewidth": 1}


def dashed(axes: Axes, y: float) -> None:
    axes.axhline(y, **DASHED)


def dashed_handle(label: str) -> Line2D:
    return Line2D([], [], label=label, **DASHED)


def light_grid(axes: Axes, axis: str = "both") -> None:
    """Grid lines behind the data, no frame lines at the top and on the right."""
    axes.grid(axis=axis, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def entries_per_line(width: float) -> int:
    """Entries of the legend beside each other, in a figure of this width in inches."""
    return max(2, int((width - 1.2) / 1.55))  # the last entry is the longest


def legend_lines(handles: Sequence[Line2D], width: float) -> int:
    return -(-len(handles) // entries_per_line(width))


def save(figure: Figure, path: Path, title: Sequence[str], handles: Sequence[Line2D]) -> None:
    """Puts the title lines above the panels and the legend below them, and writes the file."""
    width, height = figure.get_size_inches()
    for i, text in enumerate(title):
        y = 1 - (0.12 + 0.24 * i) / height
        weight = "bold" if i == 0 else "normal"
        figure.text(0.01, y, text, ha="left", va="top", fontsize=11, fontweight=weight)
    figure.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=entries_per_line(width),
        frameon=False,
        fontsize=9,
    )
    bottom = (0.12 + 0.24 * legend_lines(handles, width)) / height
    figure.tight_layout(rect=(0, bottom, 1, 1 - (0.14 + 0.24 * len(title)) / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
