"""Sets of numbers as intervals, from a first number to one past the last: ascending, none touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def union(spans: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """What is in any of the spans, which come in any order; empty ones are dropped."""
    merged: list[tuple[Number, Number]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start < end:
            merged.append((start, end))
    return merged


def common(
    first: list[tuple[Number, Number]], second: list[tuple[Number, Number]]
) -> list[tuple[Number, Number]]:
    """What is in both sets."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(
    whole: list[tuple[Number, Number]], removed: list[tuple[Number, Number]]
) -> list[tuple[Number, Number]]:
    """What is in the first set and not in the second."""
    if not whole:
        return []
    edges = [whole[0][0]]
    for span in removed:
        edges += span
    edges.append(whole[-1][1])
    # From an end in the second set to the next start.
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return common(whole, [(start, end) for start, end in gaps if start < end])


def length(spans: Iterable[tuple[Number, Number]]) -> Number | int:
    """How much is in a set."""
    return sum(end - start for start, end in spans)
