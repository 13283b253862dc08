"""Sets of times: spans (from, to) in seconds, as sorted lists that neither overlap nor touch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The times that are in any of the spans; spans without a length are dropped."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The times that are in both sets."""
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


def without(whole: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """The times of the first set that are not in the second."""
    if not whole:
        return []
    edges = [(-float("inf"), whole[0][0]), *removed, (whole[-1][1], float("inf"))]
    gaps = [(left[1], right[0]) for left, right in pairwise(edges) if left[1] < right[0]]
    return common(whole, gaps)


def length(spans: Iterable[Span]) -> float:
    """The seconds in a set."""
    return sum(end - start for start, end in spans)


def lanes(spans: Sequence[Span]) -> list[int]:
    """A lane from 0 on for each span, given in the order of their starts.

    No two spans of a lane overlap, and there are as few lanes as spans that overlap at one time.
    """
    free: list[int] = []
    taken: list[tuple[float, int]] = []  # end, lane
    chosen, made = [], 0
    for start, end in spans:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, made = made, made + 1
        heapq.heappush(taken, (end, lane))
        chosen.append(lane)
    return chosen
