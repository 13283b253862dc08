"""ReduceScatters of FSDP2 that run in the background of the backward pass on a CPU.

A CPU has no streams: FSDP2 starts the ReduceScatter of a module's gradients and waits until it is
complete. The result is the sharded gradient, which FSDP2 does not read before the backward pass
ends, except in the cases that :func:`may_defer` knows. If it does not read it, the call returns at
once, and the end of the backward pass waits for the operation.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

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
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        while len(self._in_flight) > MOST:
            self._in_flight.popleft()[0].wait()

    def settle(self) -> None:
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
