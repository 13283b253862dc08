"""A slow rank: the same small work on the processor, on all ranks at the same time."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_smddp.diagnostics.doctor import deviations
from deepspeed_smddp.diagnostics.doctor.deviations import Deviation
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.rank_facts import RankFacts

# A rank that takes longer than the median by this factor is slow.
SLOW = 1.5
# From this share of the time on, the rank waited for a core rather than computed slowly.
_WAITED = 0.3

_WORK = 8 << 20  # bytes to hash
_SECONDS = 0.4
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Core:
    """The fastest of several rounds: its seconds, and which share of them it had no core."""

    seconds: float
    waited: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"seconds": round(self.seconds, 5), "waited": round(self.waited, 3)}


def run() -> Core:
    """Hashes the same bytes for 0.4 seconds. The fastest round counts: a core that another process
    keeps busy slows all of them, a short disturbance does not.
    """
    work = bytes(_WORK)
    fastest = Core(math.inf, 0.0)
    end = time.perf_counter() + _SECONDS
    done = 0
    while done < _LEAST_ROUNDS or time.perf_counter() < end:
        began, computed = time.perf_counter(), time.thread_time()
        hashlib.sha256(work).digest()
        seconds = time.perf_counter() - began
        if seconds < fastest.seconds:
            waited = 1 - (time.thread_time() - computed) / seconds
            fastest = Core(seconds, max(0.0, waited))
        done += 1
    return fastest


def judge(cores: Mapping[int, Core], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    """The ranks that take longer than the median by ``SLOW``, with the likely cause."""
    if not cores:
        return
    median = statistics.median(core.seconds for core in cores.values())
    for rank, core in sorted(cores.items()):
        if core.seconds <= SLOW * median:
            continue
        cause = (
            f"it had no core for {core.waited:.0%} of the time: other processes, or other ranks, "
            "run on its cores"
            if core.waited > _WAITED
            else "it had its core all the time: the core is slower (its clock, power or heat)"
        )
        text = (
            f"{deviations.named([rank], ranks)}: the same work takes {core.seconds * 1e3:.1f} ms, "
            f"the median of all ranks is {median * 1e3:.1f} ms; {cause}"
        )
        yield Deviation("slow rank", text, Verdict.LIMITED, (rank,))
