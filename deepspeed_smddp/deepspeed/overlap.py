"""Reduces ZeRO-3's gradients while the backward pass continues, on the CPU too.

With ``overlap_comm`` DeepSpeed reduces a bucket of gradients on a separate stream. The CPU has no
streams: there DeepSpeed starts the ReduceScatter in the middle of the backward pass and waits for
it at once. With this module the backward pass continues. DeepSpeed's use of the sums follows when
they have arrived, at the latest when the backward pass ends. The sums are of the same values, in
the same order per parameter, and so have the same bits.

The reduction does not wait until a bucket is full. Pieces of a bucket are sent as they come, so
that the network is busy from the first gradients on and little is left to do after the last. A
bucket bounds the memory: the pieces of one bucket are in flight while the next bucket fills. With
``contiguous_gradients`` that takes two buffers of ``reduce_bucket_size`` elements, as in ZeRO-2.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed_smddp.deepspeed import operations, reduce
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.upstream import versions, wrapping

FEATURE = "overlap"

_STAGE3 = "deepspeed.runtime.zero.stage3"
_EPILOGUE = "independent_gradient_partition_epilogue"
_REDUCE_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

# Gradients are sent before their bucket is full if they have at least so many bytes, and each
# rank's part of them at least so many.
_PIECE = 1 << 20
_PART = 64 << 10


@dataclass(frozen=True)
class _Piece:
    """Gradients in flight."""

    params: list[torch.nn.Parameter]
    sums: list[torch.Tensor]
    gradients: list[torch.Tensor]  # kept alive while the operation reads them
    work: Any


class Overlap:
    """The reductions of one optimizer, in the order in which they were started."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._in_flight: deque[_Piece] = deque()
        # Per type: the latest piece of the bucket that fills, and the parameters of its pieces; the
        # last piece of the bucket before; the buffer of that bucket.
        self._latest: dict[torch.dtype, _Piece] = {}
        self._started: dict[torch.dtype, set[int]] = {}
        self._before: dict[torch.dtype, _Piece] = {}
        self._spare: dict[torch.dtype, torch.Tensor] = {}

    def start(self, bucket: Any, dtype: torch.dtype) -> None:
        """Starts to reduce in ``dtype`` the gradients of a bucket that are not in flight yet."""
        params = sorted(bucket.params, key=lambda param: param.ds_id)
        started = self._started.setdefault(dtype, set())
        for param in params:
            assert param.ds_id not in started, "a bucket has one gradient per parameter"
            started.add(param.ds_id)
        gradients = [param.grad.to(dtype) for param in params]
        group = operations.resolve(_group_of(self._optimizer, bucket))
        label = operations.described(params, "gradients of ")
        sums, work = reduce.start(gradients, group, *label)
        self._latest[dtype] = _Piece(params, sums, gradients, work)
        self._in_flight.append(self._latest[dtype])
        for param in params:
            param.grad = None
        bucket.params.clear()

    def turn(self, bucket: Any, dtype: torch.dtype) -> None:
        """Empties a bucket whose gradients are all in flight, and gives it the other buffer.

        Waits first until the bucket before it has been reduced.
        """
        last = self._before.pop(dtype, None)
        while last is not None and any(piece is last for piece in self._in_flight):
            self._finish_first()
        self._started.pop(dtype, None)
        if dtype in self._latest:
            self._before[dtype] = self._latest.pop(dtype)
        bucket.params.clear()
        bucket.elements = 0
        if hasattr(bucket, "process_group"):
            bucket.process_group = None
        if bucket.buffer is not None:
            own, spare = bucket.buffer, self._spare.get(dtype)
            if spare is None or (spare.shape, spare.dtype) != (own.shape, own.dtype):
                spare = torch.empty_like(own)
            self._spare[dtype], bucket.buffer = own, spare

    def free_spare(self, buckets: Mapping[torch.dtype, Any]) -> None:
        """Frees the second buffer of each bucket that has given up its own."""
        for dtype, bucket in buckets.items():
            if bucket.buffer is None:
                self._spare.pop(dtype, None)

    def collect(self) -> None:
        """Adds the sums that have arrived to this rank's gradients; does not wait."""
        while self._in_flight and self._in_flight[0].work.is_completed():
            self._finish_first()

    def finish(self) -> None:
        """Waits for all pieces in flight and adds the sums to this rank's gradients."""
        self._latest.clear()
        self._started.clear()
        self._before.clear()
        while self._in_flight:
            self._finish_first()

    @torch.no_grad()
    def _finish_first(self) -> None:
        piece = self._in_flight.popleft()
        piece.work.wait()
        # The bucket that fills may hold another gradient of the same parameter.
        waiting = [param.grad for param in piece.params]
        optimizer = self._optimizer
        # The type in which stage 3 hands sums to ``partition_grads``.
        before = versions.order(versions.version("DeepSpeed") or "") < (0, 19, 2)
        kind = optimizer.dtype if before else optimizer.gradient_accumulation_dtype
        sums = [part.to(kind) for part in piece.sums]
        optimizer.partition_grads(piece.params, sums)
        for param, gradient in zip(piece.params, waiting, strict=True):
            param.grad = gradient


_overlaps: WeakKeyDictionary[Any, Overlap] = WeakKeyDictionary()


def install(deepspeed: Any) -> None:
    """Wraps stage 3's set-up, its reduction of a bucket and the end of its backward pass."""
    optimizer_type = deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
    replacements = (
        ("__init__", _init),
        ("_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket", _add_gradient),
        (_REDUCE_BUCKET, _reduce_bucket),
        (_EPILOGUE, _end_backward),
        ("offload_states", _offload),
    )
    for name, around in replacements:
        wrapping.wrap(optimizer_type, name, around)


def _init(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    original(optimizer, *args, **kwargs)
    given = inspect.signature(original).bind(optimizer, *args, **kwargs).arguments
    if (
        given.get("overlap_comm")
        and get_accelerator().is_synchronized_device()  # other devices have streams
        and backend.serves(operations.resolve(optimizer.dp_process_group), torch.device("cpu"))
        # Another class may override what is wrapped; this package's own calls what it overrides.
        and type(optimizer).__module__.startswith((_STAGE3, "deepspeed_smddp."))
    ):
        _overlaps[optimizer] = Overlap(optimizer)


def _add_gradient(
    original: Callable[..., None], optimizer: Any, param: Any, *args: Any, **kwargs: Any
) -> None:
    original(optimizer, param, *args, **kwargs)
    overlap = _overlaps.get(optimizer)
    if overlap is None or args or kwargs:
        return
    overlap.collect()
    dtype = optimizer.get_param_comm_dtype(param)
    bucket = optimizer.ipg_buckets[dtype]
    ranks = operations.resolve(_group_of(optimizer, bucket)).size()
    size = sum(gradient.nbytes for gradient in _gradients(bucket))
    if size >= max(_PIECE, _PART * ranks) and _can_overlap(optimizer, bucket, dtype):
        overlap.start(bucket, dtype)


def _reduce_bucket(
    original: Callable[..., None],
    optimizer: Any,
    communication_data_type: torch.dtype,
    *args: Any,
    **kwargs: Any,
) -> None:
    overlap, dtype = _overlaps.get(optimizer), communication_data_type
    if overlap is None:
        original(optimizer, dtype, *args, **kwargs)
        return
    bucket = optimizer.ipg_buckets[dtype]
    _gradients(bucket)
    other_way = any(args) or any(kwargs.values())  # safe_mode, until 0.17.5
    if bucket.params and (other_way or not _can_overlap(optimizer, bucket, dtype)):
        overlap.finish()
        original(optimizer, dtype, *args, **kwargs)
        return
    if bucket.params:
        overlap.start(bucket, dtype)
    if bucket.elements:
        overlap.turn(bucket, dtype)


def _end_backward(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    # Until 0.18.4 the original ends with the count of micro-steps, which partition_grads reads.
    overlap = _overlaps.get(optimizer)
    if overlap is not None:
        from deepspeed.runtime.torch_autocast import sort_dtypes

        for dtype in sort_dtypes(optimizer.ipg_buckets.keys()):
            getattr(optimizer, _REDUCE_BUCKET)(dtype)
        overlap.finish()
    original(optimizer, *args, **kwargs)


def _offload(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    overlap = _overlaps.get(optimizer)
    if overlap is not None:
        overlap.free_spare(optimizer.ipg_buckets)


def _gradients(bucket: Any) -> list[torch.Tensor]:
    """The gradients that wait in a bucket; raises if other code has dropped one of them."""
    dropped = [param for param in bucket.params if param.grad is None]
    if dropped:
        label, *_ = operations.described(dropped, "gradients of ")
        raise RuntimeError(
            f"smddp: {label} were set to None (zero_grad) while they waited to be reduced, which "
            "the end of this engine's backward() does. Drop gradients after it, and call "
            "backward() of each engine whose parameters a loss depends on"
        )
    return [param.grad for param in bucket.params]


def _group_of(optimizer: Any, bucket: Any) -> Any:
    """The group that reduces a bucket; until 0.19.2 all buckets have the optimizer's."""
    return getattr(bucket, "process_group", optimizer.dp_process_group)


def _can_overlap(optimizer: Any, bucket: Any, dtype: torch.dtype) -> bool:
    """Whether DeepSpeed only adds the sums, and reads them only after the backward pass."""
    params, group = bucket.params, _group_of(optimizer, bucket)
    count = operations.resolve(group).size()
    if (
        any(param.grad.numel() != param.ds_numel for param in params)
        or not optimizer.reduce_scatter
        or getattr(optimizer, "zenflow", False)  # from 0.18.0 on
        or getattr(optimizer, "enable_sanity_checks", False)  # from 0.17.6 on
        or optimizer.all2all_process_group is not None
        or (optimizer.postscale_gradients and optimizer.gradient_predivide_factor != 1.0)
        or (dtype == optimizer.dtype and any(p.grad.dtype != dtype for p in params))
        or _has_groups_of_its_own(optimizer, params, group, count)
        or len({param.ds_id for param in params}) != len(params)
    ):
        return False
    gradients = [param.grad for param in params]
    return reduce.plain(gradients) and operations.serves(group, FEATURE)


def _has_groups_of_its_own(optimizer: Any, params: Any, group: Any, count: int) -> bool:
    """Whether a parameter is averaged over other ranks than those of ``group``; from 0.19.3 on."""
    if not hasattr(optimizer, "_get_param_partition_group"):
        return False
    return bool(
        optimizer._gradient_averaging_world_size(params, count) != count
        or any(optimizer._get_param_partition_group(param) != group for param in params)
    )
