"""FSDP2 (``fully_shard``) over smddp: gathers in memory that a host's ranks share, hybrid sharding.

``fully_shard`` needs nothing of this: it works on any smddp group. What :func:`enable` adds, on CPU
tensors: the buffers of its collectives lie where the neighbours read them in place, and gathers
that were started ahead and reductions run while the model computes. See ``docs/fsdp.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from deepspeed_smddp import fsdp_backward, memory, settings
from deepspeed_smddp.errors import SmddpConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["enable", "mesh"]

_Model = TypeVar("_Model", bound=nn.Module)

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:  # torch moved them: enable() leaves FSDP2's own collectives in place
    AllGather = ReduceScatter = object  # type: ignore[misc,assignment]

# torch 2.13 renamed these.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REPLICATE, SHARD = "replicate", "shard"


def mesh(hybrid_shard_degree: int = 0, device_type: str | None = None) -> DeviceMesh:
    """The mesh for ``fully_shard(module, mesh=...)`` that shards within so many neighbouring ranks.

    Args:
        hybrid_shard_degree: 0, or the number of ranks: shard over all of them, a mesh of one
            dimension, ``"shard"``. 1: replicate, shard nothing. p: ranks 0..p-1 hold one copy of
            the state, p..2p-1 the next; gradients are reduce-scattered within a copy and then
            averaged over the copies. 1 and p give the dimensions ``("replicate", "shard")``.
        device_type: of the parameters; by default "cuda" where torch sees a GPU, else "cpu".

    Every rank of the job must call it, once and with the same degree: it makes process groups.

    Raises:
        SmddpConfigError: the degree does not divide the number of ranks.
        RuntimeError: there is no default process group.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
        divisors = ", ".join(str(p) for p in range(1, ranks + 1) if ranks % p == 0)
        raise SmddpConfigError(
            f"hybrid_shard_degree is {degree}, but may hold a divisor of the {ranks} ranks: "
            f"{divisors} (or 0 for all of them)"
        )
    # Not init_device_mesh(): it would split a default group that is bound to a device, which smddp
    # does not do.
    divide: Any = dist.new_subgroups_by_enumeration
    copies = torch.arange(ranks).view(-1, degree)
    groups = [divide(members.tolist())[0] for members in (copies.T, copies)]
    return DeviceMesh.from_group(groups, device_type, copies, mesh_dim_names=(REPLICATE, SHARD))


def enable(model: _Model, *, forward_prefetch: int = 1) -> _Model:
    """Gives every ``fully_shard``-ed module of ``model`` smddp's AllGather and ReduceScatter.

    Results are the same to the bit. On CPU tensors the buffers that ranks of a host exchange lie in
    their shared memory, so that a gather copies each byte once, straight to where its reader wants
    it, and gathers and reductions run in the background. On other devices FSDP2's own behaviour
    stays.

    Args:
        model: after ``fully_shard``; may itself be sharded or not.
        forward_prefetch: on CPU tensors, how many modules ahead the forward pass gathers, in the
            order of ``model.modules()``; each holds its buffer meanwhile. 0 leaves the choice to
            ``set_modules_to_forward_prefetch``, as does a model that skips modules. (FSDP2 itself
            gathers the next module ahead in the backward pass.)

    Returns:
        ``model`` itself.

    Raises:
        ImportError: the extension is missing or was built for another torch.
        SmddpConfigError: a parameter's mesh talks over another backend.
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
        settings.warn_once(
            "fsdp", f"smddp: FSDP2 keeps its own buffers, as {reason}; the results are the same"
        )
        return model
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    behind = fsdp_backward.Reductions() if on_cpu and fsdp_backward.known() else None
    for module in sharded:
        module.set_custom_all_gather(SharedAllGather())
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
        group = groups[0] if groups else None
        module.set_custom_reduce_scatter(SharedReduceScatter(group, behind if group else None))
    if on_cpu:
        for i, module in enumerate(sharded):
            ahead = sharded[i + 1 : i + 1 + forward_prefetch]
            if ahead:
                module.set_modules_to_forward_prefetch(ahead)
    return model


class _SharedBuffers:
    """FSDP2's ``Comm.allocate``: on the CPU, memory that the host's ranks share."""

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if device.type == "cpu":
            return memory.shared_empty(math.prod(int(n) for n in size), dtype)
        return torch.empty(*size, dtype=dtype, device=device)


class SharedAllGather(_SharedBuffers, AllGather):
    """AllGather of one module's parameters, ``input_tensor`` being its slice of the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # A CPU has no streams to run ahead on; FSDP2 waits for the Work before it copies out.
        background = async_op or output_tensor.device.type == "cpu"
        work: dist.Work | None = _all_gather(
            output_tensor, input_tensor, group=group, async_op=background
        )
        return work


class SharedReduceScatter(_SharedBuffers, ReduceScatter):
    """ReduceScatter of one module's gradients.

    Args:
        group: FSDP2's own name for the module's parameters, an ``FSDPParamGroup``.
        behind: takes those that may go on behind the backward pass; None: FSDP2 waits for each.
    """

    def __init__(self, group: Any = None, behind: fsdp_backward.Reductions | None = None) -> None:
        self._group = group
        self._behind = behind

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if output_tensor.device.type == "cpu" and op == dist.ReduceOp.PREMUL_SUM:
            # set_gradient_divide_factor(): NCCL alone scales on the way.
            input_tensor.mul_(op.__getstate__()[1])
            op = dist.ReduceOp.SUM
        behind = self._behind
        if behind is not None and fsdp_backward.is_left_alone(self._group, output_tensor, op):
            work: dist.Work = _reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=True
            )
            behind.add(work, output_tensor, input_tensor)
            return None
        if behind is not None:
            behind.settle()  # FSDP2 may be about to add to what one of them gives
        done: dist.Work | None = _reduce_scatter(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )
        return done


def _check_groups(model: nn.Module) -> None:
    # Raises where a mesh of a sharded parameter has a group that is not smddp's.
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    for one in meshes:
        for group in one.get_all_groups():
            backends = str(dist.get_backend_config(group))
            if "smddp" not in backends:
                raise SmddpConfigError(
                    f"fsdp.enable() needs ranks that talk over smddp, and the model's mesh has a "
                    f'group over {backends}; call init_process_group("smddp") before fully_shard'
                )


def _refusal(sharded: Sequence[FSDPModule]) -> str | None:
    # What keeps the custom collectives away, or None.
    if AllGather is object:
        return f"torch {torch.__version__} has no AllGather and ReduceScatter to derive from"
    for name in (
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_modules_to_forward_prefetch",
    ):
        if not hasattr(FSDPModule, name):
            return f"torch {torch.__version__} has no FSDPModule.{name}"
    for module in sharded:
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
        if len(groups) > 1:
            return f"a {type(module).__name__} is sharded over several meshes"
    return None
