"""The replica all-reduce of sharding by degree: a shard group's gradients, averaged over replicas.

At an accumulation boundary each bucket's gradients are averaged as soon as the shard group has
reduced them, while the backward pass goes on; what is left follows at the step. Averaging twice
changes nothing, as replicas hold equal gradients after the first time: so a gradient that is
reduced again later, such as that of a parameter in two recomputed segments, is averaged again.

Knows tensors and process groups, but not DeepSpeed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.deepspeed.sharding.shard_groups import KEY, Sharding
from deepspeed_smddp.intervals import union, without

Run = tuple[int, int]  # elements of the buffer, from the first to one past the last


class ReplicasDiffer(RuntimeError):
    """Replicas have reduced other gradients, or in another order."""


@dataclass(frozen=True)
class _Flight:
    parameters: frozenset[int]
    runs: list[Run]
    works: list[Any]


class ReplicaAllReduce:
    """Averages the gradients in ``buffer``, this rank's shard of them, over the replicas."""

    def __init__(self, buffer: torch.Tensor, sharding: Sharding) -> None:
        self.buffer = buffer
        self._sharding = sharding
        self._flights: list[_Flight] = []

    @property
    def started(self) -> list[Run]:
        """What has been averaged since the last :meth:`finish`, or is under way, in its order."""
        return [run for flight in self._flights for run in flight.runs]

    def start(self, parameters: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Starts to average parts of the buffer; all replicas start the same, in the same order.

        Args:
            parameters: the numbers of the parameters whose gradients these are.
            parts: views of the buffer. No other code may use them before :meth:`wait`,
                :meth:`forget` or :meth:`finish`.
        """
        runs = union(
            (begin, begin + part.numel())
            for part in parts
            for begin in [int(part.storage_offset() - self.buffer.storage_offset())]
        )
        works = [self._average(run) for run in runs]
        self._flights.append(_Flight(frozenset(parameters), runs, works))

    def forget(self, parameters: Sequence[int]) -> None:
        """Gradients of these parameters are going to change: what was started is done again."""
        changing = [f for f in self._flights if not f.parameters.isdisjoint(parameters)]
        for flight in changing:
            _wait(flight.works)
            self._flights.remove(flight)

    def wait(self) -> None:
        """Waits until nothing is under way."""
        for flight in self._flights:
            _wait(flight.works)

    def finish(self) -> None:
        """Averages what has not been started, and waits for all of it.

        Raises:
            ReplicasDiffer: the replicas have not started the same.
        """
        early = self.started
        rest = [self._average(run) for run in without([(0, self.buffer.numel())], union(early))]
        self.wait()
        _wait(rest)
        self._flights.clear()
        if early:
            self._compare(early)

    def _average(self, run: Run) -> Any:
        return self._sharding.average(self.buffer.narrow(0, run[0], run[1] - run[0]))

    def _compare(self, runs: list[Run]) -> None:
        digest = zlib.crc32(repr(runs).encode())
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=self.buffer.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._sharding.replica_group)
        most, least = both.tolist()
        if most != -least:
            raise ReplicasDiffer(
                f"{KEY}: the replicas have reduced the gradients of different parameters in this "
                "step, or in another order, so that their averages are wrong. If each replica "
                'chooses its own layers, set "overlap_comm" of "zero_optimization" to false: then '
                "all gradients are averaged at the step"
            )


def _wait(works: list[Any]) -> None:
    while works:
        works.pop(0).wait()
