"""FSDP2's AllGather and ReduceScatter objects, with buffers in memory that a host's ranks share.

``enabling`` gives them to the modules of a model; FSDP2 calls them once per module and pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import memory
from deepspeed_smddp.distributed.labels import labelled
from deepspeed_smddp.fsdp import background

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:  # torch moved them: enable() leaves FSDP2's own collectives in place
    AllGather = ReduceScatter = object  # type: ignore[misc,assignment]

AVAILABLE = AllGather is not object

# torch 2.13 renamed these.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _SharedBuffers:
    """FSDP2's ``Comm.allocate``: on the CPU, memory that the host's ranks share.

    Args:
        group: FSDP2's object for the module's parameters, an ``FSDPParamGroup``.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def _labelled(self) -> contextlib.AbstractContextManager[None]:
        name = getattr(self._group, "_module_fqn", None)
        return labelled(f"FSDP2 module {name or '(the model itself)'}")

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
        """Gathers, on the CPU always asynchronously."""
        # A CPU has no streams on which a gather could run ahead, so it is always asynchronous
        # there; FSDP2 waits for the Work before it copies the output.
        asynchronous = async_op or output_tensor.device.type == "cpu"
        with self._labelled():
            work: dist.Work | None = _all_gather(
                output_tensor, input_tensor, group=group, async_op=asynchronous
            )
        return work


class SharedReduceScatter(_SharedBuffers, ReduceScatter):
    """ReduceScatter of one module's gradients.

    Args:
        group: FSDP2's object for the module's parameters, an ``FSDPParamGroup``.
        reductions: takes the operations that may finish during the rest of the backward pass;
            None: FSDP2 waits for each operation.
    """

    def __init__(self, group: Any = None, reductions: background.Reductions | None = None) -> None:
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
        if reductions is not None and background.may_defer(self._group, output_tensor, op):
            with self._labelled():
                work: dist.Work = _reduce_scatter(
                    output_tensor, input_tensor, group=group, op=op, async_op=True
                )
            reductions.add(work, output_tensor, input_tensor)
            return None
        if reductions is not None:
            reductions.settle()  # FSDP2 may be about to add to the result of one of them
        with self._labelled():
            done: dist.Work | None = _reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )
        return done
