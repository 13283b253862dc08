"""The device mesh of hybrid sharding: ``deepspeed_smddp.fsdp.mesh``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from deepspeed_smddp.errors import OR_ALL, SmddpConfigError, no_divisor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"


def mesh(hybrid_shard_degree: int = 0, device_type: str | None = None) -> DeviceMesh:
    """The mesh for ``fully_shard(module, mesh=...)`` that shards within groups of adjacent ranks.

    Args:
        hybrid_shard_degree: 0, or the number of ranks: shard over all of them, a mesh of one
            dimension, ``"shard"``. 1: replicate, shard nothing. p: ranks 0..p-1 hold one copy of
            the state, p..2p-1 the next; gradients are reduce-scattered within a copy and then
            averaged over the copies. 1 and p give the dimensions ``("replicate", "shard")``.
        device_type: the device type of the parameters; default: "cuda" if torch sees a GPU, else
            "cpu".

    Every rank of the job must call it, once and with the same degree: it makes process groups.

    Raises:
        SmddpConfigError: the degree does not divide the number of ranks.
        RuntimeError: there is no default process group.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise RuntimeError('fsdp.mesh() divides ranks: call init_process_group("smddp") first')
    ranks = dist.get_world_size()
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    degree = hybrid_shard_degree
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 0:
        raise SmddpConfigError(
            f"hybrid_shard_degree is {degree!r}, but may hold 0 (all ranks), 1 (no sharding) or a "
            "number of ranks"
        )
    if degree == 0 or (degree == ranks and ranks > 1):
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=(SHARD,))
    if ranks % degree:
        raise no_divisor("hybrid_shard_degree", degree, ranks, "ranks", OR_ALL)
    return init_device_mesh(
        device_type, (ranks // degree, degree), mesh_dim_names=(REPLICATE, SHARD)
    )
