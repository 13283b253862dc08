"""The process groups of sharding by degree, and the replica all-reduce of their gradients.

Knows the settings and torch.distributed, but not DeepSpeed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.errors import OR_ALL, no_divisor
from deepspeed_smddp.intervals import union, without

KEY = f'"{SECTION}.sharded_data_parallel_degree"'
Run = tuple[int, int]  # elements of the buffer, from the first to one past the last


@dataclass(frozen=True, eq=False)
class Sharding:
    """One rank's groups. ``world`` has the n data-parallel ranks that are divided."""

    degree: int
    world: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup

    @property
    def replicas(self) -> int:
        """Copies of the model's state: n / p."""
        return self.world.size() // self.degree

    @property
    def replica(self) -> int:
        """The index of the copy that this rank holds a shard of."""
        return self.world.rank() // self.degree

    def average(self, part: torch.Tensor) -> Any:
        """Starts to replace a part of a shard by its mean over the replicas."""
        # Divides first, as DeepSpeed does: a sum of fp16 gradients must not overflow if their mean
        # does not.
        part.div_(self.replicas)
        return dist.all_reduce(part, group=self.replica_group, async_op=True)

    @classmethod
    def within(cls, world: Any = None) -> Sharding | None:
        """The division of ``world`` (None: all ranks) that the settings ask for.

        Every rank of the job must call it, with the world that it belongs to. None if the state is
        sharded over all ranks: no degree, one that equals the world's size, or no smddp.

        Raises:
            SmddpConfigError: the degree does not divide the world's size.
        """
        degree = asked_degree()
        world = dist.group.WORLD if world is None else world
        if degree in (0, world.size()):
            return None
        if world.size() % degree:
            raise no_divisor(KEY, degree, world.size(), "data-parallel ranks", OR_ALL)
        ranks = tuple(dist.get_process_group_ranks(world))
        made = _of_job()
        if (degree, ranks) not in made:
            made[degree, ranks] = _make(world, ranks, degree)
        return made[degree, ranks]

    @classmethod
    def of(cls, shard_group: Any) -> Sharding | None:
        """The division whose shard group is this process group, or None."""
        return next((one for one in _of_job().values() if one.shard_group is shard_group), None)


# Of one default group, by degree and the world's ranks. All ranks make them in the same order.
_made: dict[tuple[int, tuple[int, ...]], Sharding] = {}
_default: Any = None


def _of_job() -> dict[tuple[int, tuple[int, ...]], Sharding]:
    global _default
    if _default is not dist.group.WORLD:  # a new job in the same process
        _default = dist.group.WORLD
        _made.clear()
    return _made


def _make(world: Any, ranks: tuple[int, ...], degree: int) -> Sharding:
    worlds = [ranks]
    if len(ranks) != dist.get_world_size():
        # With tensor or pipeline parallelism there are several data-parallel worlds, and each rank
        # knows its own. All ranks make all groups, in the same order.
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, ranks)
        worlds = sorted(set(gathered))
    shards = [list(w[i : i + degree]) for w in worlds for i in range(0, len(w), degree)]
    replicas = [list(w[i::degree]) for w in worlds for i in range(degree)]
    make: Callable[..., Any] = dist.new_subgroups_by_enumeration
    shard_group, _ = make(shards)
    replica_group, _ = make(replicas)
    return Sharding(degree, world, shard_group, replica_group)


def asked_degree() -> int:
    """The degree that applies now; 0 if none is set or the default group is not smddp's."""
    if not comm_backend.serves_default_group():
        return 0
    return settings.current().section.sharded_data_parallel_degree


class ReplicasDiffer(RuntimeError):
    """Replicas have reduced other gradients, or in another order."""


@dataclass(frozen=True)
class _Flight:
    parameters: frozenset[int]
    runs: list[Run]
    works: list[Any]


class ReplicaAllReduce:
    """Averages the gradients in ``buffer``, this rank's shard of them, over the replicas.

    At an accumulation boundary each bucket's gradients are averaged as soon as the shard group has
    reduced them, while the backward pass goes on; what is left follows at the step. Averaging twice
    changes nothing, as replicas hold equal gradients after the first time: so a gradient that is
    reduced again later, such as that of a parameter in two recomputed segments, is averaged again.
    """

    def __init__(self, buffer: torch.Tensor, sharding: Sharding) -> None:
        self.buffer = buffer
        self._sharding = sharding
        self._flights: list[_Flight] = []

    @property
    def started(self) -> list[Run]:
        """What has been averaged since the last :meth:`finish`, or is under way, in its order."""
        return [run for flight in self._flights for run in flight.runs]

    def start(self, parameters: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Starts to average gradients; all replicas start the same, in the same order.

        ``parts`` are views of the buffer. No other code may use them before :meth:`wait`,
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
