"""Tables of two builds of this package that took turns: this one and the other one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from shared.build import OTHER

from .call_rows import Row
from .comparison import by_case, line, microseconds

HEAD = ("operation", "type", "bytes", "competitor", "this us", "other us", "this / other")
HEAD_OF_TURNS = ("least", "median", "most", "beyond the spread")
NOTE = (
    "This build beside the other one: median microseconds and the ratio of these medians (below 1: "
    "this build is faster); the ratio turn by turn; and whether all turns of this build were "
    "faster or slower than all turns of the other one."
)


def lines_of(rows: Sequence[Row]) -> list[list[str]]:
    """The cells below HEAD and HEAD_OF_TURNS, for the rows of one setting."""
    out = []
    for case, found in by_case(rows).items():
        for name, this in found.items():
            other = found.get(f"{name}{OTHER}")
            if other is not None:
                cells = [case.op, case.dtype, f"{case.bytes:,}", name]
                cells += [microseconds(this), microseconds(other)]
                cells += [f"{this.median_us / other.median_us:.3f}"]
                out.append([*cells, *turn_by_turn(this.times(), other.times())])
    return out


def turn_by_turn(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    if not ours or not theirs:
        return [""] * len(HEAD_OF_TURNS)
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    figures = (min(ratios), statistics.median(ratios), max(ratios))
    return [*(f"{figure:.3f}" for figure in figures), beyond_spread(ours, theirs)]


def beyond_spread(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if min(ours) > max(theirs):
        return "slower"
    return "faster" if max(ours) < min(theirs) else "no"


def terminal_table(rows: Sequence[Row]) -> Table:
    out = Table(*HEAD, *HEAD_OF_TURNS, title=NOTE, title_justify="left", box=None, pad_edge=False)
    for column in [out.columns[2], *out.columns[4:]]:
        column.justify = "right"
    for cells in lines_of(rows):
        out.add_row(*cells)
    return out


def markdown(rows: Sequence[Row]) -> list[str]:
    """Lines for the rows of one setting; none if no competitor is of another build."""
    lines = [line(cells) for cells in lines_of(rows)]
    if not lines:
        return []
    marks = ["---"] * 2 + ["---:"] + ["---"] + ["---:"] * 6 + ["---"]
    return [NOTE, "", line([*HEAD, *HEAD_OF_TURNS]), line(marks), *lines]
