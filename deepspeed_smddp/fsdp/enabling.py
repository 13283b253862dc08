"""``deepspeed_smddp.fsdp``: the mesh of hybrid sharding, and smddp's collectives for FSDP2.

``enable`` checks what the model's meshes and this torch's FSDP2 offer before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from deepspeed_smddp.errors import OR_ALL, SmddpConfigError, no_divisor, warn_once
from deepspeed_smddp.fsdp import shared_collectives
from deepspeed_smddp.upstream import source

_Model = TypeVar("_Model", bound=nn.Module)


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
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    if ranks % degree:
        raise no_divisor("hybrid_shard_degree", degree, ranks, "ranks", OR_ALL)
    return init_device_mesh(
        device_type, (ranks // degree, degree), mesh_dim_names=("replicate", "shard")
    )


def enable(model: _Model, *, forward_prefetch: int = 1) -> _Model:
    """Gives every ``fully_shard``-ed module of ``model`` smddp's AllGather and ReduceScatter.

    Results are the same to the bit. On CPU tensors, the buffers that the ranks of a host exchange
    lie in their shared memory, so that a gather copies each byte once, straight to its place in the
    reader's output. Gathers and reductions run in the background. On other devices FSDP2 behaves as
    before.

    Args:
        model: a model after ``fully_shard``; the root itself may be sharded or not.
        forward_prefetch: on CPU tensors, how many modules ahead the forward pass gathers, in the
            order of ``model.modules()``; each of these modules holds its buffer meanwhile. 0: the
            caller chooses by ``set_modules_to_forward_prefetch``; use it too for a model that skips
            modules. (FSDP2 itself gathers the next module ahead in the backward pass.)

    Returns:
        ``model`` itself.

    Raises:
        ImportError: the extension is missing or was built for another torch.
        SmddpConfigError: a parameter's mesh communicates over another backend.
        ValueError: no module of ``model`` is sharded, or ``forward_prefetch`` is negative.
    """
    sharded: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ValueError("fsdp.enable() finds no sharded module: call fully_shard(model) first")
    if forward_prefetch < 0:
        raise ValueError(f"forward_prefetch is {forward_prefetch}, but may hold 0 or more")
    _check_groups(model)
    reason = _refusal(sharded)
    if reason is not None:
        warn_once(
            "fsdp", f"smddp: FSDP2 keeps its own buffers, as {reason}; the results are the same"
        )
        return model
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    reductions = (
        shared_collectives.Reductions() if on_cpu and source.known("fsdp backward") else None
    )
    for module in sharded:
        group = next(iter(_parameter_groups(module)), None)
        module.set_custom_all_gather(shared_collectives.SharedAllGather(group))
        module.set_custom_reduce_scatter(
            shared_collectives.SharedReduceScatter(group, reductions if group else None)
        )
    if on_cpu:
        for i, module in enumerate(sharded):
            ahead = sharded[i + 1 : i + 1 + forward_prefetch]
            if ahead:
                module.set_modules_to_forward_prefetch(ahead)
    return model


def _check_groups(model: nn.Module) -> None:
    # Raises if the mesh of a sharded parameter has a group of another backend.
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    for one in meshes:
        for group in one.get_all_groups():
            backends = str(dist.get_backend_config(group))
            if "smddp" not in backends:
                raise SmddpConfigError(
                    "fsdp.enable() needs ranks that communicate over smddp, but the model's mesh "
                    f"has a group over {backends}; call "
                    'init_process_group("smddp") before fully_shard'
                )


def _refusal(sharded: Sequence[FSDPModule]) -> str | None:
    # Why FSDP2 can't take the custom collectives, or None.
    if not shared_collectives.AVAILABLE:
        return f"torch {torch.__version__} has no AllGather and ReduceScatter to derive from"
    for module in sharded:
        if len(_parameter_groups(module)) > 1:
            return f"a {type(module).__name__} is sharded over several meshes"
    return None


def _parameter_groups(module: FSDPModule) -> Sequence[Any]:
    # FSDP2's objects for the module's own parameters, an ``FSDPParamGroup`` per mesh.
    state = module._get_fsdp_state()
    several: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    one = getattr(state, "_fsdp_param_group", None)  # torch 2.11
    return () if one is None else (one,)
