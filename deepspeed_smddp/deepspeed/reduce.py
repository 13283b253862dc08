"""ZeRO-3's ReduceScatter without the flat copy of the gradients.

DeepSpeed copies a bucket's gradients, interleaved by rank and padded, into one flat tensor,
divides it by the number of ranks, and reduces it. This module divides the gradients in place
(DeepSpeed drops them right after), and one coalesced ReduceScatter reads them there. The sums are
the same, bit by bit. On GPUs all of it is ordered by the stream on which DeepSpeed reduces: the one
that is current when :func:`reduce_scatter` is called, and that waits for the sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_smddp.deepspeed import operations
from deepspeed_smddp.upstream import wrapping

FEATURE = "reduce"

_averaged = threading.local()  # params: whose gradients stage 3 averages in this thread


def install(deepspeed: Any) -> None:
    """Wraps the function that stage 3 calls, so that :func:`reduce_scatter` does its work."""
    stage3 = deepspeed.runtime.zero.stage3
    wrapping.wrap(stage3, "reduce_scatter_coalesced", _reduce)
    wrapping.wrap(
        stage3.DeepSpeedZeroOptimizer_Stage3,
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        _remember_parameters,
    )


def _remember_parameters(
    original: Callable[..., Any], optimizer: Any, params_to_reduce: Any, *args: Any, **kwargs: Any
) -> Any:
    _averaged.params = params_to_reduce
    try:
        return original(optimizer, params_to_reduce, *args, **kwargs)
    finally:
        _averaged.params = ()


def _reduce(
    original: Callable[..., list[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> list[torch.Tensor]:
    other_way = bool(args or kwargs) or not plain(tensors)
    if other_way or not operations.serves(group, FEATURE, tensors[0].device):
        return original(tensors, group, *args, **kwargs)
    return reduce_scatter(tensors, operations.resolve(group))


def reduce_scatter(tensors: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Waits for the operation of :func:`start` and returns its results."""
    params = getattr(_averaged, "params", ())
    results, work = start(
        tensors, group, *(operations.described(params, "gradients of ") if params else ())
    )
    work.wait()
    return results


@torch.no_grad()
def start(
    tensors: Sequence[torch.Tensor],
    group: Any,
    label: str = "",
    parameters: Sequence[str] = (),
    digest: int = 0,
) -> tuple[list[torch.Tensor], Any]:
    """Starts to compute this rank's part of each tensor's mean over the ranks.

    Overwrites the tensors.

    Args:
        tensors: contiguous, of one floating type; equal shapes on all ranks. No other code may use
            their memory until the operation is closed.
        group: a process group of n ranks.
        label, parameters, digest: of those whose gradients these are, as
            :func:`operations.described` returns them.

    Returns:
        For rank r and each tensor of N elements, the elements of the range [r c, (r + 1) c) that
        exist, with c = ceil(N / n); in place if the range is full. And the operation: wait for it
        before you read them.
    """
    ranks, rank = group.size(), group.rank()
    inputs, outputs, results = [], [], []
    for tensor in tensors:
        flat = tensor.view(-1)
        flat.div_(ranks)
        count = flat.numel()
        part = -(-count // ranks)
        start = min(rank * part, count)
        have = min(part, count - start)
        # The sums are written to this rank's part of the input, unless they exceed its end.
        output = flat.narrow(0, start, part) if have == part else operations.memory(part, flat)
        inputs.append(flat if part * ranks == count else _padded(flat, part * ranks))
        outputs.append(output)
        results.append(output.narrow(0, 0, have))
    work = operations.start(
        "reduce_scatter_tensor",
        inputs,
        lambda: group.reduce_scatter_tensor_coalesced(outputs, inputs),
        label or f"ZeRO-3 gradients ({len(tensors)})",
        parameters,
        digest,
    )
    return results, work


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` elements from the tensor's first on: in its storage, or in a copy if that is short.

    The values of the padding do not matter: their sums are dropped.
    """
    end = (flat.storage_offset() + count) * flat.element_size()
    if end <= flat.untyped_storage().nbytes():
        return flat.as_strided((count,), (1,))
    copy = operations.memory(count, flat).zero_()
    copy.narrow(0, 0, flat.numel()).copy_(flat)
    return copy


def plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether :func:`start` accepts these tensors."""
    return (
        len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1
        and operations.computes_on(tensors[0].device)
        and all(tensor.is_contiguous() for tensor in tensors)
    )
