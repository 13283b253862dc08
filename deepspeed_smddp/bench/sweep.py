"""The sweep: case by case, the backends take turns, A B A B, and all ranks agree on what follows.

After each turn the ranks exchange their times, what they found wrong, and whether one of them is to
stop; so they stop at the same place. The exchange is an AllGather of the default group, which is
smddp's. Ctrl-C, or a launcher that ends the job, stops the sweep after the current turn.
"""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_smddp.bench.bench_case import Case
from deepspeed_smddp.bench.bench_report import Result, Sent
from deepspeed_smddp.bench.call_buffers import CallBuffers, Wrong
from deepspeed_smddp.bench.timed_values import WEIGHTS, TimedValues
from deepspeed_smddp.distributed import extension

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within ``with``, the first signal is kept; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._keep) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()


TURN_SECONDS = 0.1  # planned, of one backend
_CALLS = (3, 200)  # of a turn whose number of calls follows from its planned length


@dataclass(frozen=True)
class Rules:
    """How each case is measured; ``repeats``: calls of a turn, 0: as many as fill a turn."""

    turns: int = 5
    repeats: int = 0
    warm_up: int = 2


class Sweep:
    """All cases over all backends, given with their groups over all ranks in the order of turns."""

    def __init__(
        self,
        groups: dict[str, dist.ProcessGroup],
        device: torch.device,
        rules: Rules,
        interruption: Interruption,
        values: TimedValues = WEIGHTS,
    ) -> None:
        self._groups, self._device, self._rules = groups, device, rules
        self._values = values
        self._interruption = interruption
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.signal = 0  # that ended the sweep on all ranks

    def run(self, cases: Sequence[Case], on_turn: Callable[[Case], None]) -> Iterator[list[Result]]:
        """The results of each case, as soon as it is measured; the last may have fewer turns.

        Raises:
            RuntimeError: an operation failed; what was measured of this case is lost.
        """
        for case in cases:
            yield self._measure(case, on_turn)
            if self.signal:
                return

    def _measure(self, case: Case, on_turn: Callable[[Case], None]) -> list[Result]:
        buffers = CallBuffers(case, self._rank, self._ranks, self._device, self._values)
        calls = {name: buffers.call(group) for name, group in self._groups.items()}
        found = {name: Result(case, name) for name in calls}
        repeats = {name: self._warm_up(buffers, call) for name, call in calls.items()}
        for name in list(calls) * self._rules.turns:
            on_turn(case)
            if self.signal:
                break
            before = sent_so_far()
            took = self._times(buffers, calls[name], repeats[name])
            sent = sent_so_far().since(before)
            of = self._exchange(took, sent, buffers.check(calls[name]))
            found[name].turns.append(of.slowest)
            found[name].wrong += of.wrong
            if name == "smddp":
                found[name].sent = found[name].sent.and_also(of.sent)
        return [result for result in found.values() if result.turns]

    def _warm_up(self, buffers: CallBuffers, call: Callable[[], object]) -> int:
        """Connects, maps memory; the number of calls that a turn has, the same on all ranks."""
        took = self._times(buffers, call, max(1, self._rules.warm_up))
        slowest = self._exchange(took, Sent(), None).slowest
        if self._rules.repeats:
            return self._rules.repeats
        return min(max(math.ceil(TURN_SECONDS / min(slowest)), _CALLS[0]), _CALLS[1])

    def _times(self, buffers: CallBuffers, call: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of each of so many calls on this rank, the first of which begin together."""
        buffers.prepare()
        if self._device.type == "cuda":
            return _times_on_gpu(buffers, call, repeats)
        dist.barrier()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            seconds.append(max(1e-9, time.perf_counter() - began))
            if buffers.case.in_place:
                buffers.prepare()
        return seconds

    def _exchange(self, took: list[float], sent: Sent, wrong: Wrong | None) -> _Turn:
        """The turn of all ranks."""
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, (self._interruption.number, wrong, took, sent))
        signals, wrongs, times, parts = zip(*everyone, strict=True)
        self.signal = self.signal or max(signals)
        texts = [
            f"element {found.element} on rank {rank} is {found.got:g}, not {found.expected:g}"
            for rank, found in enumerate(wrongs)
            if found is not None
        ]
        slowest = [max(of_call) for of_call in zip(*times, strict=True)]
        return _Turn(slowest, texts, functools.reduce(Sent.and_also, parts))


class _Turn(NamedTuple):
    """Seconds of each call on the slowest rank, what is wrong on any, what all have sent."""

    slowest: list[float]
    wrong: list[str]
    sent: Sent


def sent_so_far() -> Sent:
    """What this process has sent to other hosts, and what its first group last said of coding."""
    rows = extension.core.statistics()
    sent, raw = (sum(row[key] for row in rows) for key in ("sent_bytes", "sent_raw_bytes"))
    return Sent(sent, raw, extension.core.group_states()[0]["coding"])


def _times_on_gpu(buffers: CallBuffers, call: Callable[[], object], repeats: int) -> list[float]:
    """By the GPU's clock, between events on the stream: launching is not in it."""
    make: Any = torch.cuda.Event
    events = [[make(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    dist.barrier()
    for before, after in events:
        before.record()
        call()
        after.record()
        if buffers.case.in_place:
            buffers.prepare()
    torch.cuda.synchronize()
    return [max(1e-9, 1e-3 * before.elapsed_time(after)) for before, after in events]
