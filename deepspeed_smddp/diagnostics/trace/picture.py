"""A picture of a step: for each rank its compute, what is hidden behind it, what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from deepspeed_smddp.diagnostics import pictures
from deepspeed_smddp.diagnostics.trace.intervals import Span, common, without
from deepspeed_smddp.diagnostics.trace.timeline import RankTimeline, Shares, Timeline

# What the rows of a rank are called, their colours, and what the legend says.
_ROWS = (
    ("compute", "#7aa6c2", "compute: between waits"),
    ("hidden", "#7fb77e", "hidden: in flight while no thread waits for it"),
    ("waits", "#d1495b", "waits: communication that is exposed"),
)
_ROW_HEIGHT = 0.26
_MOST_RANKS = 32


class PictureError(Exception):
    """There is no picture; one sentence says why, and what to do."""


def draw(timeline: Timeline, title: str, span: Span, path: Path) -> None:
    """Draws what the ranks did in a span, in seconds of the reference's clock, into a file.

    Of more than 32 ranks the first are drawn; the title is about all.

    Raises:
        PictureError: matplotlib is missing, or the file can't be written.
    """
    pictures.check_available(PictureError, "a picture")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = list(timeline.ranks.values())
    shown = ranks[:_MOST_RANKS]
    figure = Figure(figsize=(11, 1.7 + 0.75 * len(shown)), dpi=130, layout="constrained")
    axes = figure.subplots()
    start, end = span
    for place, line in enumerate(shown):
        for row, ((_, colour, _), times) in enumerate(zip(_ROWS, _rows(line, span), strict=True)):
            bars = [((begin - start) * 1e3, (stop - begin) * 1e3) for begin, stop in times]
            top = place + 0.1 + row * _ROW_HEIGHT
            axes.broken_barh(bars, (top, _ROW_HEIGHT * 0.94), facecolors=colour)
        if place > 0:
            axes.axhline(place, color="#bbbbbb", linewidth=0.6)
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks(
        [place + 0.5 for place in range(len(shown))],
        [f"rank {line.rank}\n{line.host}" for line in shown],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"milliseconds; {clocks(timeline)}")
    axes.set_title(f"{title}: {headline([line.shares(span) for line in ranks])}", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=label) for _, colour, label in _ROWS],
        loc="outside lower center",
        ncols=len(_ROWS),
        frameon=False,
        fontsize=9,
    )
    pictures.save(figure, path, PictureError)


def headline(shares: Sequence[Shares]) -> str:
    """``hidden 31.0 of 45.2 ms of communication (mean of 4 ranks)``."""
    hidden = mean(of.hidden for of in shares) * 1e3
    whole = mean(of.in_flight for of in shares) * 1e3
    of = f" (mean of {len(shares)} ranks)" if len(shares) > 1 else ""
    return f"hidden {hidden:.1f} of {whole:.1f} ms of communication{of}"


def clocks(timeline: Timeline) -> str:
    """How sure the clocks are, for the picture."""
    if len(timeline.clocks) == 1:
        return "one host, one clock"
    sure = [clock.uncertainty for clock in timeline.clocks.values()]
    if None in sure:
        return "how far the clocks of the hosts are apart is not known"
    return f"clocks of the hosts equal within {max(s or 0.0 for s in sure) * 1e3:.3f} ms"


def _rows(line: RankTimeline, span: Span) -> tuple[list[Span], list[Span], list[Span]]:
    waits = common(line.waits, [span])
    hidden = without(common(line.in_flight, [span]), waits)
    return without([span], waits), hidden, waits
