"""The process groups of sharding by degree, made once per data-parallel world.

Knows the settings and torch.distributed, but not DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.errors import OR_ALL, no_divisor

KEY = f'"{SECTION}.sharded_data_parallel_degree"'


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

    @classmethod
    def within(cls, world: Any = None) -> Sharding | None:
        """The division of ``world`` (None: all ranks) that the settings ask for.

        Every rank of the job must call it, with the world that it belongs to. None if the state is
        sharded over all ranks: no degree, one that equals the world's size, or no smddp.

        Raises:
            SmddpConfigError: the degree does not divide the world's size.
        """
        degree = asked_degree()
        if degree == 0:
            return None
        return _groups().divide(dist.group.WORLD if world is None else world, degree)

    @classmethod
    def of(cls, shard_group: Any) -> Sharding | None:
        """The division whose shard group is this process group, or None."""
        return _groups().by_shard_group.get(shard_group)


class _Groups:
    """The groups made under one default group. All ranks make them once, in the same order."""

    def __init__(self) -> None:
        self.default = dist.group.WORLD
        self.by_shard_group: dict[Any, Sharding] = {}
        self._by_ranks: dict[tuple[int, tuple[int, ...]], Sharding] = {}

    def divide(self, world: Any, degree: int) -> Sharding | None:
        size = world.size()
        if degree == size:
            return None
        if size % degree:
            raise no_divisor(KEY, degree, size, "data-parallel ranks", OR_ALL)
        ranks = tuple(dist.get_process_group_ranks(world))
        if (degree, ranks) not in self._by_ranks:
            self._make(world, ranks, degree)
        return self._by_ranks[degree, ranks]

    def _make(self, world: Any, ranks: tuple[int, ...], degree: int) -> None:
        worlds = [ranks] if len(ranks) == dist.get_world_size() else _worlds_of_all_ranks(ranks)
        shards = [list(w[i : i + degree]) for w in worlds for i in range(0, len(w), degree)]
        replicas = [list(w[i::degree]) for w in worlds for i in range(degree)]
        make: Callable[..., Any] = dist.new_subgroups_by_enumeration
        shard_group, _ = make(shards)
        replica_group, _ = make(replicas)
        sharding = Sharding(degree, world, shard_group, replica_group)
        self._by_ranks[degree, ranks] = self.by_shard_group[shard_group] = sharding


_made: _Groups | None = None


def _groups() -> _Groups:
    global _made
    if _made is None or _made.default is not dist.group.WORLD:  # a new job in the same process
        _made = _Groups()
    return _made


def _worlds_of_all_ranks(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    # With tensor or pipeline parallelism there are several data-parallel worlds, and each rank
    # knows its own. All ranks make all groups, in the same order.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ranks)
    return sorted(set(gathered))


def asked_degree() -> int:
    """The degree that applies now; 0 if none is set or the default group is not smddp's."""
    if not comm_backend.serves_default_group():
        return 0
    return settings.current().section.sharded_data_parallel_degree
