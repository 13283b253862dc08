"""ZeRO-3's AllGathers without copies: shards are received in the parameters' own memory.

DeepSpeed gathers a bucket of parameters into one flat tensor, with a ``cat`` before (the shards)
and one per parameter after. This module first allocates each parameter's memory, and AllGathers
fill it: one for each large parameter, coalesced ones for small parameters. It gathers persistent
parameters, which DeepSpeed gathers one by one after each step, in the same way. Bits and memory are
those of DeepSpeed's path, which still serves the calls that :func:`_direct` refuses. It is the same
on GPUs, where streams order all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import operations
from deepspeed_smddp.upstream import wrapping

FEATURE = "gather"

# Parameters of up to so many output bytes in total share one AllGather, to save start-ups. A larger
# parameter has its own, so that its layer does not wait for the bytes of others.
_TOGETHER = 256 << 10

# By group, the id of the first parameter of its latest bucket. In the backward pass ids decrease.
_latest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Piece:
    """One AllGather in flight, and the parameters that it fills."""

    def __init__(self, sources: Sequence[tuple[Any, torch.Tensor]], group: Any) -> None:
        self.params = [param for param, _ in sources]
        shards = [shard for _, shard in sources]
        self._memory = [operations.memory(s.numel() * group.size(), s) for s in shards]
        self._work = operations.start(
            "all_gather_into_tensor",
            shards,
            lambda: group.allgather_into_tensor_coalesced(self._memory, shards),
            *operations.described(self.params),
        )

    def wait(self, handle_dependency: bool = True) -> None:
        """Returns once the parameters can be used, or raises the AllGather's error."""
        if not self._memory:
            return
        self._work.wait()
        for param, memory in zip(self.params, self._memory, strict=True):
            param.data = memory.narrow(0, 0, param.ds_numel).view(param.ds_shape)
            param.ds_status = type(param.ds_status).AVAILABLE
        self._memory.clear()  # a parameter's memory is freed when DeepSpeed releases it


class Gathering:
    """The pieces of one call. With :meth:`of` the caller waits for one parameter only."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._piece_of = {param.ds_id: piece for piece in pieces for param in piece.params}

    def of(self, param: Any) -> Piece:
        """The piece that gathers ``param``."""
        return self._piece_of[param.ds_id]

    def wait(self, handle_dependency: bool = True) -> None:
        """Waits for all parameters."""
        for piece in self._pieces:
            piece.wait()


def install(deepspeed: Any) -> None:
    """Wraps DeepSpeed's gathers; calls that this module does not serve take DeepSpeed's path."""
    zero = deepspeed.runtime.zero
    init = zero.partition_parameters.Init
    registry = zero.partitioned_param_coordinator.InflightParamRegistry
    wrapping.wrap(init, "_convert_to_deepspeed_param", _convert)
    wrapping.wrap(init, "_allgather_params_coalesced", _gather_at_once)
    wrapping.wrap(registry, "__setitem__", _remember_piece)


def _convert(
    original: Callable[..., None], init: Any, param: Any, *args: Any, **kwargs: Any
) -> None:
    original(init, param, *args, **kwargs)
    operations.number(param, operations.resolve(init.get_partition_dp_group(param)))
    theirs = param.all_gather_coalesced

    def all_gather_coalesced(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        params = sorted(params, key=lambda p: p.ds_id)  # the same order on all ranks
        other_way = any(args) or any(kwargs.values())  # safe_mode, quantize
        one_by_one = getattr(init, "allgather_sequential", False)  # from 0.18.6 on
        if other_way or one_by_one or not _direct(init, params, True):
            return theirs(params, *args, **kwargs)
        init._ensure_availability_of_partitioned_params(params)
        for param in params:
            if param.ds_status is not type(param.ds_status).NOT_AVAILABLE:
                raise RuntimeError(
                    "smddp: a parameter is to be gathered that was not released: "
                    f"{param.ds_summary()}"
                )
        return _start(init, params, hpz=True)

    param.all_gather_coalesced = all_gather_coalesced


def _gather_at_once(
    original: Callable[..., None],
    init: Any,
    param_list: Sequence[Any],
    hierarchy: Any = 0,
    quantize: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    # DeepSpeed calls it for persistent parameters after a step and for zero.GatheredParameters.
    # ``hierarchy`` has no effect.
    if quantize or args or kwargs or not _direct(init, param_list, False):
        original(init, param_list, hierarchy, quantize, *args, **kwargs)
    else:
        _start(init, param_list, hpz=False).wait()


def _remember_piece(
    original: Callable[..., None], registry: Any, param: Any, handle: Any, *args: Any, **kwargs: Any
) -> None:
    piece = handle.of(param) if isinstance(handle, Gathering) else handle
    original(registry, param, piece, *args, **kwargs)


def _direct(init: Any, params: Sequence[Any], hpz: bool) -> bool:
    """Whether this module can gather the parameters: plain shards, in groups smddp serves."""
    if not params or init.use_all_reduce_for_fetch_params:
        return False
    if type(init).__name__ != "Init":  # MiCS_Init, until 0.19.6, gathers in two steps
        return False
    if not _plain(params):
        return False
    seen = {id(group): group for group in (_source(init, param, hpz)[0] for param in params)}
    device = params[0].ds_tensor.device
    return all(operations.serves(group, FEATURE, device) for group in seen.values())


def _plain(params: Sequence[Any]) -> bool:
    """Whether the shards are on the device that computes and travel as they are."""
    device = params[0].ds_tensor.device
    # Not computed on: shards that are kept in host memory.
    return operations.computes_on(device) and all(
        param.ds_tensor.device == device
        and not hasattr(param.ds_tensor, "ds_quant_scale")
        and getattr(param, "comm_dtype", param.ds_tensor.dtype) == param.ds_tensor.dtype
        for param in params
    )


def _source(init: Any, param: Any, hpz: bool) -> tuple[Any, torch.Tensor]:
    """The group that gathers a parameter, and this rank's shard of it."""
    if hpz and init.zero_param_process_group is not None and param.ds_secondary_tensor is not None:
        return init.zero_param_process_group, param.ds_secondary_tensor
    return operations.resolve(init.get_partition_dp_group(param)), param.ds_tensor


def _start(init: Any, params: Sequence[Any], hpz: bool) -> Gathering:
    by_group: dict[int, tuple[Any, list[tuple[Any, torch.Tensor]]]] = {}
    for param in params:
        group, shard = _source(init, param, hpz)
        by_group.setdefault(id(group), (group, []))[1].append((param, shard.view(-1)))
        param.ds_status = type(param.ds_status).INFLIGHT
    return Gathering(
        [
            Piece(piece, group)
            for group, found in by_group.values()
            for piece in _pieces(found, group)
        ]
    )


def _pieces(found: list[Any], group: Any) -> Iterator[list[Any]]:
    """Cuts a bucket, in the order of use, into the parts that one operation each gathers."""
    first, last = found[0][0].ds_id, found[-1][0].ds_id
    if last < _latest.get(group, last):
        found = found[::-1]
    _latest[group] = first
    current = settings.apply()
    piece: list[Any] = []
    size = elements = 0
    for param, shard in found:
        count = shard.numel() * group.size()
        size += count * shard.element_size()
        elements += count
        if piece and (size > _TOGETHER or current.exceeds_allgather(size, elements)):
            yield piece
            piece, size, elements = [], count * shard.element_size(), count
        piece.append((param, shard))
    yield piece
