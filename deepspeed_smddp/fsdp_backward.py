"""ReduceScatters of FSDP2 that go on behind the backward pass on a CPU.

A CPU has no streams: FSDP2 hands each module's gradients to its ReduceScatter and goes on when that
is over. Its result is the sharded gradient, which nobody looks at before the backward pass ends,
but for some uses of FSDP2, which :func:`is_left_alone` knows. Where it is left alone, the call
returns at once, and the end of the backward pass waits for it.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp import settings
from deepspeed_smddp.zero import private_parts

# Modules whose gradients are under way at once; each holds their buffer. One on the wire, one
# behind it, so that the wire need not wait for the next.
MOST = 2

_PLACE = "torch.distributed.fsdp._fully_shard"
# What goes on around the call, with a digest of its source in torch 2.13.
_READ = {
    (f"{_PLACE}._fsdp_collectives", "foreach_reduce"): "18035a2b90ea2724",
    (f"{_PLACE}._fsdp_param_group", "FSDPParamGroup.post_backward"): "af80d905ca6e9833",
    (f"{_PLACE}._fsdp_state", "FSDPState._root_post_backward_final_callback"): "e3f83e17634cc0ff",
}


@cache
def known() -> bool:
    """Whether FSDP2 is the one that was read; where not, the first question logs it."""
    for (module, name), read in _READ.items():
        try:
            found = private_parts.digest(module, name)
        except (ImportError, OSError, LookupError, SyntaxError):
            found = None
        if found != read:
            settings.warn_once(
                "fsdp backward",
                f"smddp: FSDP2 waits for each reduction on the CPU, as {name} of torch "
                f"{torch.__version__} is not one this package knows; the results are the same",
            )
            return False
    return True


class Reductions:
    """ReduceScatters of one model that are under way. ``started`` counts them."""

    def __init__(self) -> None:
        self.started = 0
        self._under_way: deque[tuple[dist.Work, tuple[torch.Tensor, ...]]] = deque()
        self._backward = -1

    def add(self, work: dist.Work, *tensors: torch.Tensor) -> None:
        """Leaves ``work``, which needs ``tensors``, to the end of the backward pass."""
        self.started += 1
        self._under_way.append((work, tensors))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # one that failed has not called
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        while len(self._under_way) > MOST:
            self._under_way.popleft()[0].wait()

    def settle(self) -> None:
        """Waits for all of them."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


def is_left_alone(group: Any, output: torch.Tensor, op: Any) -> bool:
    """Whether nothing looks at a ReduceScatter's ``output`` before the backward pass is over.

    ``group``: FSDP2's ``FSDPParamGroup``. It divides after a sum, averages copies of hybrid
    sharding, casts, adds to gradients that are there, and calls hooks, all at once.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    if torch._C._current_graph_task_id() == -1 or op != dist.ReduceOp.AVG:
        return False
    if isinstance(group.mesh_info, DDPMeshInfo) or group._all_reduce_hook is not None:
        return False
    if group._orig_dtype not in (None, output.dtype):
        return False
    return not any(
        p.offload_to_cpu
        or p.sharded_param.grad is not None
        or getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
        for p in group.fsdp_params
    )
