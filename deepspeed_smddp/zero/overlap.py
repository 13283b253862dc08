"""ZeRO-3's gradients travel while the backward pass goes on, on the CPU too.

With ``overlap_comm`` DeepSpeed reduces a bucket of gradients on a stream of its own. The CPU has no
streams: there it starts the ReduceScatter in the middle of the backward pass and waits for it at
once. Here the backward pass goes on; what DeepSpeed does with the sums follows when the next bucket
is full, at the latest when the backward pass ends. The same operations on the same values, in the
same order per parameter, so the same bits.

One bucket is under way while the next one fills: with ``contiguous_gradients`` there are two
buffers of ``reduce_bucket_size`` elements, as in ZeRO-2.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed_smddp.zero import groups, private_parts, reduce

FEATURE = "overlap"

_EPILOGUE = "independent_gradient_partition_epilogue"
_NOT_OVERRIDDEN = (_EPILOGUE, "partition_grads", "reduce_independent_p_g_buckets_and_remove_grads")


@dataclass(frozen=True)
class _Reduction:
    """One bucket under way."""

    params: list[torch.nn.Parameter]
    sums: list[torch.Tensor]
    gradients: list[torch.Tensor]  # kept while the operation reads them
    work: Any
    buffer: torch.Tensor | None  # that the gradients are in, if they are side by side


class Overlap:
    """The reductions of one optimizer, at most one at a time."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._under_way: _Reduction | None = None
        self._spare: dict[torch.dtype, torch.Tensor] = {}

    def start(self, bucket: Any, dtype: torch.dtype) -> None:
        """Begins to reduce a bucket in ``dtype``; it is empty afterwards. None may be under way."""
        params = sorted(bucket.params, key=lambda param: param.ds_id)
        gradients = [param.grad.to(dtype) for param in params]
        sums, work = reduce.start(gradients, groups.resolve(bucket.process_group))
        self._under_way = _Reduction(params, sums, gradients, work, bucket.buffer)
        for param in params:
            param.grad = None
        bucket.clear_params()
        if bucket.buffer is not None:
            spare = self._spare.pop(bucket.buffer.dtype, None)
            if spare is None or spare.shape != bucket.buffer.shape:
                spare = torch.empty_like(bucket.buffer)
            bucket.buffer = spare

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the bucket under way and adds its sums to this rank's gradients."""
        reduction, self._under_way = self._under_way, None
        if reduction is None:
            return
        reduction.work.wait()
        # Another gradient of the same parameter may be waiting in the bucket that fills.
        waiting = [param.grad for param in reduction.params]
        optimizer = self._optimizer
        sums = [part.to(optimizer.gradient_accumulation_dtype) for part in reduction.sums]
        optimizer.partition_grads(reduction.params, sums)
        for param, gradient in zip(reduction.params, waiting, strict=True):
            param.grad = gradient
        if reduction.buffer is not None:
            self._spare[reduction.buffer.dtype] = reduction.buffer


_overlaps: WeakKeyDictionary[Any, Overlap] = WeakKeyDictionary()


def install(deepspeed: Any) -> None:
    """Wraps stage 3's set-up, its reduction of a bucket and the end of its backward pass."""
    optimizer_type = getattr(deepspeed.runtime.zero.stage3, "DeepSpeedZeroOptimizer_Stage3", None)
    known = {name: getattr(optimizer_type, name, None) for name in _NOT_OVERRIDDEN}
    replacements = (
        ("__init__", functools.partial(_init, known)),
        ("_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", _reduce_bucket),
        (_EPILOGUE, _end_backward),
    )
    if any(not callable(getattr(optimizer_type, name, None)) for name, _ in replacements):
        return  # a DeepSpeed of another kind; it goes on as it is
    for name, around in replacements:
        private_parts.wrap(optimizer_type, name, around)
    known[_EPILOGUE] = getattr(optimizer_type, _EPILOGUE)


def _init(
    known: dict[str, Any],
    original: Callable[..., None],
    optimizer: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    from deepspeed.accelerator import get_accelerator

    original(optimizer, *args, **kwargs)
    given = inspect.signature(original).bind(optimizer, *args, **kwargs).arguments
    if (
        given.get("overlap_comm")
        and get_accelerator().is_synchronized_device()  # the others have streams
        and all(getattr(type(optimizer), name) is known[name] for name in known)
    ):
        _overlaps[optimizer] = Overlap(optimizer)


def _reduce_bucket(original: Callable[..., None], optimizer: Any, dtype: torch.dtype) -> None:
    overlap = _overlaps.get(optimizer)
    if overlap is None:
        original(optimizer, dtype)
        return
    bucket = optimizer.ipg_buckets[dtype]
    if not bucket.params:
        return
    overlap.finish()
    if _can_overlap(optimizer, bucket, dtype):
        overlap.start(bucket, dtype)
    else:
        original(optimizer, dtype)


def _end_backward(original: Callable[..., None], optimizer: Any) -> None:
    original(optimizer)
    overlap = _overlaps.get(optimizer)
    if overlap is not None:
        overlap.finish()


def _can_overlap(optimizer: Any, bucket: Any, dtype: torch.dtype) -> bool:
    """Whether DeepSpeed would do nothing to the sums but add them, nor look at them in between."""
    params, group = bucket.params, bucket.process_group
    count = groups.resolve(group).size()
    if (
        any(param.grad is None or param.grad.numel() != param.ds_numel for param in params)
        or not optimizer.reduce_scatter
        or optimizer.zenflow
        or optimizer.enable_sanity_checks
        or optimizer.all2all_process_group is not None
        or (optimizer.postscale_gradients and optimizer.gradient_predivide_factor != 1.0)
        or (dtype == optimizer.dtype and any(p.grad.dtype != dtype for p in params))
        or optimizer._gradient_averaging_world_size(params, count) != count
        or any(optimizer._get_param_partition_group(param) != group for param in params)
        or len({param.ds_id for param in params}) != len(params)
    ):
        return False
    gradients = [param.grad for param in params]
    return (
        reduce.plain(gradients) and not private_parts.is_logged() and groups.serves(group, FEATURE)
    )
