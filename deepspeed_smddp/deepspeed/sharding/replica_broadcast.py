"""Broadcasts of DeepSpeed's parameters reach all replicas.

``zero.Init``, ``Module.apply`` under it and ``GatheredParameters(modifier_rank=...)`` broadcast a
parameter within the group that it is partitioned over. If that is a shard group, the other replicas
would keep values of their own, and the source, a rank of the data-parallel world, may not be in the
group at all.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from deepspeed_smddp.deepspeed.sharding.shard_groups import Sharding


class ReplicaBroadcast:
    """``deepspeed.comm``, but a call on a shard group is a call on its data-parallel world."""

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
            src = src if src in ranks else ranks[0]  # Module.apply passes 0 for the first rank
        return self._comm.broadcast(tensor, src, group=group, **options)

    def get_global_rank(self, group: Any = None, group_rank: int = 0) -> int:
        """The global rank of a data-parallel rank."""
        sharding = Sharding.of(group)
        if sharding is not None:
            return dist.get_process_group_ranks(sharding.world)[group_rank]
        return int(self._comm.get_global_rank(group, group_rank))


def install() -> None:
    """Puts it in the place of ``deepspeed.comm`` in ``partition_parameters``, once."""
    from deepspeed.runtime.zero import partition_parameters

    if not isinstance(partition_parameters.dist, ReplicaBroadcast):
        partition_parameters.dist = ReplicaBroadcast(partition_parameters.dist)
