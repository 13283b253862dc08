"""Parameters that are set on one rank reach all replicas.

``zero.Init``, ``Module.apply`` under it and ``GatheredParameters(modifier_rank=...)`` broadcast a
parameter within the group that it is partitioned over. Where that is a shard group, the other
replicas would keep values of their own, and the source, a rank of the data-parallel world, need not
be in the group at all.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from deepspeed_smddp.zero.sharding.shard_groups import Sharding


class ReplicaBroadcast:
    """``deepspeed.comm``, but what is said of a shard group holds for its whole world."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def broadcast(self, tensor: Any, src: int, group: Any = None, **options: Any) -> Any:
        """Sends from global rank ``src`` to all data-parallel ranks."""
        sharding = Sharding.of(group)
        if sharding is not None:
            group = sharding.world
            ranks = dist.get_process_group_ranks(group)
            src = src if src in ranks else ranks[0]  # Module.apply says 0 and means the first
        return self._comm.broadcast(tensor, src, group=group, **options)

    def get_global_rank(self, group: Any = None, group_rank: int = 0) -> int:
        """The global rank of a data-parallel rank."""
        sharding = Sharding.of(group)
        if sharding is not None:
            return dist.get_process_group_ranks(sharding.world)[group_rank]
        return int(self._comm.get_global_rank(group, group_rank))


def install() -> None:
    """Puts it in front of the broadcasts of ``partition_parameters``; once is enough."""
    from deepspeed.runtime.zero import partition_parameters

    if not isinstance(partition_parameters.dist, ReplicaBroadcast):
        partition_parameters.dist = ReplicaBroadcast(partition_parameters.dist)
