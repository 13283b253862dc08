"""ZeRO-3's ReduceScatter without the flat copy of the gradients.

DeepSpeed copies a bucket's gradients, interleaved by rank and padded, into one flat tensor,
divides that by the number of ranks, and reduces it. Here the gradients are divided where they are
(DeepSpeed drops them right after), and one coalesced ReduceScatter reads them there. The sums are
the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_smddp.upstream import wrapping
from deepspeed_smddp.zero import groups

FEATURE = "reduce"


def install(deepspeed: Any) -> None:
    """Puts :func:`reduce_scatter` in front of the function that stage 3 calls."""
    stage3 = deepspeed.runtime.zero.stage3
    if getattr(stage3, "reduce_scatter_coalesced", None) is None:
        return  # a DeepSpeed of another kind; it goes on as it is
    wrapping.wrap(stage3, "reduce_scatter_coalesced", _reduce)


def _reduce(
    original: Callable[..., list[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    group: Any = None,
) -> list[torch.Tensor]:
    if plain(tensors) and groups.serves(group, FEATURE):
        return reduce_scatter(tensors, groups.resolve(group))
    return original(tensors, group)


def reduce_scatter(tensors: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """What :func:`start` gives, once it is there."""
    results, work = start(tensors, group)
    work.wait()
    return results


@torch.no_grad()
def start(tensors: Sequence[torch.Tensor], group: Any) -> tuple[list[torch.Tensor], Any]:
    """This rank's part of each tensor's mean over the ranks; the tensors are overwritten.

    Args:
        tensors: contiguous, of one floating type; equal shapes on all ranks. Until the operation
            has ended nobody else may use their memory.
        group: a process group of n ranks.

    Returns:
        Per tensor of N elements, those of its part [r c, (r + 1) c), c = ceil(N / n), that there
        are: in place where the part is full; and the operation to wait for before they are read.
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
        # The own part of the input may take the sums, unless they run over its end.
        output = flat.narrow(0, start, part) if have == part else flat.new_empty(part)
        inputs.append(flat if part * ranks == count else _padded(flat, part * ranks))
        outputs.append(output)
        results.append(output.narrow(0, 0, have))
    return results, group.reduce_scatter_tensor_coalesced(outputs, inputs)


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The tensor with whatever follows it in its storage, or a copy where too little does.

    What the padding holds does not matter: its sums are dropped.
    """
    end = (flat.storage_offset() + count) * flat.element_size()
    if end <= flat.untyped_storage().nbytes():
        return flat.as_strided((count,), (1,))
    copy = flat.new_zeros(count)
    copy.narrow(0, 0, flat.numel()).copy_(flat)
    return copy


def plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether :func:`start` takes these tensors."""
    return bool(tensors) and all(
        tensor.is_cpu and tensor.dtype == tensors[0].dtype and tensor.is_contiguous()
        for tensor in tensors
    )
