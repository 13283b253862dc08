"""The figure: samples per second of every competitor, turn by turn, and the bound."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from shared.chart import STYLES, dashed, dashed_handle, light_grid, save

from .step_rows import Row, Setting, settings, title

UNKNOWN = ("#0072b2", "s", "")  # a competitor without a style, such as one with other settings
PRECISION = {"ZeRO-3": "bf16", "DDP": "fp32", "FSDP2": "gathered in bf16, reduced in fp32"}


def panel(axes: Axes, found: Setting) -> None:
    names = found.names()
    for place, name in enumerate(names):
        colour = STYLES.get(name, UNKNOWN)[0]
        median = found.median(name, "samples_per_second") or 0.0
        turns = [row.samples_per_second for row in found.of(name)]
        axes.bar(place, median, width=0.6, color=colour, alpha=0.75, zorder=2)
        axes.plot([place] * len(turns), turns, ".", color="black", markersize=4, zorder=3)
        axes.annotate(
            f"{median:.2f}", (place, 0.04 * median), ha="center", color="white", fontsize=9
        )
    if found.bound_ms is not None:
        dashed(axes, found.samples(found.bound_ms))
    axes.set_xticks(range(len(names)), [STYLES.get(n, ("", "", n))[2] for n in names], fontsize=9)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_title(title(found.rows), fontsize=9, loc="left")
    axes.set_ylabel("samples / s", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    light_grid(axes, axis="y")


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel per setting."""
    found = settings(rows)
    columns = 2 if len(found) == 4 else min(3, len(found))
    lines = -(-len(found) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(max(6.4, 3.9 * columns), 1.2 + 2.8 * lines), squeeze=False
    )
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, setting in zip(grid.flat, found, strict=False):
        panel(axes, setting)
    # About 6.5 points per character, in inches of 72 points.
    below = textwrap.wrap(subtitle(rows), int(figure.get_figwidth() * 72 / 6.5))
    handles = [dashed_handle("bound: max(compute, bytes / practical ceiling)")]
    schemes = " and ".join(dict.fromkeys(row.scheme for row in rows))
    save(figure, path, [f"{schemes} step of GPT-NeoX, higher is better", *below], handles)


def subtitle(rows: Sequence[Row]) -> str:
    """Models and machines."""
    models = sorted(
        {f"{r.scheme}: {r.parameters / 1e6:.1f}M parameters, {PRECISION[r.scheme]}" for r in rows}
    )
    return "; ".join([*models, *sorted({row.machine for row in rows})])
