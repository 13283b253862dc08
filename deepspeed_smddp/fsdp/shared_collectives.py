"""FSDP2's AllGather and ReduceScatter objects, with buffers in memory that a host's ranks share.

``enabling`` gives them to the modules of a model; FSDP2 calls them once per module and pass.

A CPU has no streams: FSDP2 starts the ReduceScatter of a module's gradients and waits until it is
complete. The result is the sharded gradient, which FSDP2 does not read before the backward pass
ends, except in the cases that :func:`may_defer` knows. If it does not read it, the call returns at
once, and the end of the backward pass waits for the operation.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import memory
from deepspeed_smddp.distributed.labels import labelled

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:  # torch moved them: enable() leaves FSDP2's own collectives in place
    AllGather = ReduceScatter = object  # type: ignore[misc,assignment]

AVAILABLE = AllGather is not object

# torch 2.13 renamed these.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The most modules whose gradients are in flight at once; each holds its buffer. One is on the wire,
# the next is queued, so that the wire does not idle between them.
MOST = 2


class Reductions:
    """ReduceScatters of one model that are in flight; ``started`` counts all since the start."""

    def __init__(self) -> None:
        self.started = 0
        self._in_flight: deque[tuple[dist.Work, tuple[torch.Tensor, ...]]] = deque()
        self._backward = -1

    def add(self, work: dist.Work, *tensors: torch.Tensor) -> None:
        """The end of the backward pass waits for ``work``; ``tensors`` stay alive until then."""
        self.started += 1
        self._in_flight.append((work, tensors))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # a pass that failed never ran its callback
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        while len(self._in_flight) > MOST:
            self._in_flight.popleft()[0].wait()

    def wait(self) -> None:
        """Waits for all operations in flight."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


def may_defer(group: Any, output: torch.Tensor, op: Any) -> bool:
    """Whether FSDP2 does not read a ReduceScatter's ``output`` before the backward pass ends.

    ``group`` is FSDP2's ``FSDPParamGroup``. It reads the output at once if it divides after a sum,
    averages the copies of hybrid sharding, casts, adds to existing gradients, or calls hooks.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    if torch._C._current_graph_task_id() == -1 or op != dist.ReduceOp.AVG:
        return False
    if isinstance(group.mesh_info, DDPMeshInfo) or group._all_reduce_hook is not None:
        return False
    if not _types_of_gradients(group) <= {None, output.dtype}:
        return False
    return not any(
        p.offload_to_cpu
        or p.sharded_param.grad is not None
        or getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
        for p in group.fsdp_params
    )


def _types_of_gradients(group: Any) -> set[torch.dtype | None]:
    # What FSDP2 casts the results to; None: it keeps their type.
    if hasattr(group, "_orig_dtype"):
        return {group._orig_dtype}
    return {p.sharded_grad_dtype for p in group.fsdp_params}  # from torch 2.15 on


class _SharedBuffers:
    """FSDP2's ``Comm.allocate``: on the CPU, memory that the host's ranks share.

    ``group`` is FSDP2's object for the module's parameters, an ``FSDPParamGroup``.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def _labelled(self) -> contextlib.AbstractContextManager[None]:
        name = getattr(self._group, "_module_fqn", None) or "(the model itself)"
        return labelled(f"FSDP2 module {name}", digest=zlib.crc32(name.encode()))

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if device.type == "cpu":
            return memory.shared_empty(math.prod(int(n) for n in size), dtype)
        return torch.empty(*size, dtype=dtype, device=device)


class SharedAllGather(_SharedBuffers, AllGather):
    """AllGather of one module's parameters; ``input_tensor`` is this rank's slice of the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers, on the CPU always asynchronously.

        A CPU has no streams on which a gather could run ahead. FSDP2 waits for the Work before it
        copies the output.
        """
        asynchronous = async_op or output_tensor.device.type == "cpu"
        with self._labelled():
            work: dist.Work | None = _all_gather(
                output_tensor, input_tensor, group=group, async_op=asynchronous
            )
        return work


class SharedReduceScatter(_SharedBuffers, ReduceScatter):
    """ReduceScatter of one module's gradients.

    ``reductions`` takes the operations that may finish during the rest of the backward pass; None:
    FSDP2 waits for each operation.
    """

    def __init__(self, group: Any = None, reductions: Reductions | None = None) -> None:
        super().__init__(group)
        self._reductions = reductions

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces; returns None if the result is there or the backward pass waits for it."""
        if output_tensor.device.type == "cpu" and op == dist.ReduceOp.PREMUL_SUM:
            # set_gradient_divide_factor(): only NCCL scales within the operation.
            input_tensor.mul_(op.__getstate__()[1])
            op = dist.ReduceOp.SUM
        reductions = self._reductions
        defers = reductions is not None and may_defer(self._group, output_tensor, op)
        if reductions is not None and not defers:
            reductions.wait()  # FSDP2 may be about to add to the result of one of them
        with self._labelled():
            work: Any = _reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op or defers
            )
        if reductions is None or not defers:
            return work  # type: ignore[no-any-return]
        reductions.add(work, output_tensor, input_tensor)
        return None
