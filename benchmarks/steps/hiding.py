"""How much of DDP's transfer the backward pass can hide, and how much it hid."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .workload import wire_bytes


@dataclass(frozen=True)
class Step:
    """One step of all ranks, whose hosts share a clock; ms since the first full gradient bucket."""

    ready: list[float]  # when each bucket was full on all ranks
    first: list[float]  # by rank, when its first bucket was full
    last: list[float]  # by rank, when its last gradient was ready
    end: list[float]  # by rank, when its wait for the last bucket ended
    crossed: list[float]  # by rank, bytes that its host had sent when its last gradient was ready


@dataclass(frozen=True)
class Trace:
    """The steps of a turn."""

    sizes: list[int]  # of the buckets, in bytes
    steps: list[Step]

    @staticmethod
    def of(ranks: Sequence[dict[str, Any]]) -> Trace:
        """From the traces of data_parallel_rank.py, by rank."""
        steps = []
        for of_ranks in zip(*(rank["steps"] for rank in ranks), strict=True):
            full = [rank["full"] for rank in of_ranks]
            first = [whens[0] for whens in full]

            def ms(whens: Sequence[float], begin: float = min(first)) -> list[float]:
                return [round(1000 * (when - begin), 2) for when in whens]

            steps.append(
                Step(
                    ready=ms([max(whens) for whens in zip(*full, strict=True)]),
                    first=ms(first),
                    last=ms([rank["last"] for rank in of_ranks]),
                    end=ms([rank["end"] for rank in of_ranks]),
                    crossed=[rank["crossed"] for rank in of_ranks],
                )
            )
        return Trace(ranks[0]["sizes"], steps)

    @staticmethod
    def read(text: str) -> Trace:
        read = json.loads(text)
        return Trace(read["sizes"], [Step(**step) for step in read["steps"]])

    def text(self) -> str:
        return json.dumps(asdict(self))

    def crossed(self) -> float:
        """Bytes that had crossed by the last gradient, mean of ranks and steps."""
        return statistics.fmean([of_rank for step in self.steps for of_rank in step.crossed])

    def in_transfer_ms(self) -> float:
        """From a rank's first full bucket to the end of its wait for the last one, in one step.

        Mean of ranks and steps. In the rest of the step the rank has no full bucket to send.
        """
        return statistics.fmean(
            [
                end - first
                for step in self.steps
                for first, end in zip(step.first, step.end, strict=True)
            ]
        )

    def hideable(self, hosts: int, ceiling: float) -> float:
        """Bytes that can cross before the last gradient, mean of ranks and steps.

        Buckets cross one after the other at ``ceiling`` bytes per second, each from the moment when
        it is full on all ranks.
        """
        return statistics.fmean(
            [
                _crossing_by(last, step.ready, self.sizes, hosts, ceiling)
                for step in self.steps
                for last in step.last
            ]
        )


def _crossing_by(
    end: float, ready: Sequence[float], sizes: Sequence[int], hosts: int, ceiling: float
) -> float:
    per_ms = ceiling / 1000
    free = crossed = 0.0  # when the wire is free again, and the bytes that have crossed
    for when, size in zip(ready, sizes, strict=True):
        start = max(free, when)
        least = wire_bytes(0, 0, size, hosts)
        free = start + least / per_ms
        crossed += min(least, max(0.0, end - start) * per_ms)
    return crossed
