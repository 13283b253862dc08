"""Words for the numbers of a report: ranks, sizes, times, lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_smddp.diagnostics.report.dump import Operation

_MOST_RANGES = 6
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# An operation with a label of ZeRO-3 starts with this.
ZERO3 = "ZeRO-3"


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-5, 7``; with many ranges the first ones, and how many ranks follow."""
    numbers = sorted(set(ranks))
    rows: list[list[int]] = []  # without gaps
    for rank in numbers:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    first = rows[:_MOST_RANGES]
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in first]
    rest = len(numbers) - sum(map(len, first))
    more = f" and {rest} more" if rest else ""
    return f"{verb(numbers, 'rank', 'ranks')} {', '.join(shown)}{more}" if numbers else "no rank"


def verb(ranks: Sequence[int] | set[int], one: str, several: str) -> str:
    """The form of a verb that fits the number of ranks."""
    return one if len(ranks) == 1 else several


def count(number: int, thing: str) -> str:
    """``1 call``, ``3 calls``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """Bytes in the largest unit that needs no fraction, so that two sizes never read the same."""
    for unit, name in _UNITS:
        if number >= unit and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number} bytes"


def seconds(value: float) -> str:
    """A duration: ``0.4 s``, ``35 s``, ``12 min``, ``3.5 h``."""
    if not math.isfinite(value) or value < 0:
        return "an unknown time"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def span(values: Sequence[float]) -> str:
    """The durations of several ranks, from the shortest to the longest."""
    usable = [v for v in values if math.isfinite(v) and v >= 0]
    if not usable:
        return ""
    low, high = seconds(min(usable)), seconds(max(usable))
    return low if low == high else f"{low} to {high}"


def numbered(operation: Operation) -> str:
    """``all_gather #12 of group 'default'``."""
    return f"{operation.operation} #{operation.sequence} of group '{operation.group}'"


def named(operation: Operation) -> str:
    """``all_gather #12 of group 'default' (4 MiB, DDP bucket 2)``."""
    parts = [size(operation.bytes)] if operation.bytes > 0 else []
    more = ", ".join([*parts, operation.label] if operation.label else parts)
    return f"{numbered(operation)} ({more})" if more else numbered(operation)


def counterpart(operation: Operation) -> str:
    """``the recv for `` before a send that lacks it, and the other way round; else ""."""
    if not operation.is_message:
        return ""
    return f"the {'recv' if operation.operation == 'send' else 'send'} for "


def cut(text: str, width: int) -> str:
    """One line of at most ``width`` columns."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
