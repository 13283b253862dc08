"""The exact result of a reduction, to the bit, and the random data that tests reduce.

The contract: 16-bit floats are widened to fp32; the ranks of one host are summed in rank order; the
sum of a host is rounded to the tensor's type once, when it travels to another host, and not at all
on the host that owns the result; the hosts' sums are added in the order of the hosts; the result is
rounded once. An average divides by the number of ranks before that last rounding. With
SMDDP_REDUCE_PRECISION=fp32, and in a small AllReduce, the sums of hosts travel unrounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from harness import layout as layouts

HALF = (torch.bfloat16, torch.float16)
FLOATING = (torch.float32, torch.float64, *HALF)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
REDUCIBLE = (*FLOATING, *INTEGERS)
FLOAT8 = tuple(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)
MOVABLE = (
    *REDUCIBLE,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    *FLOAT8,
)
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")

_FOLD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SUM": (torch.add, np.add),
    "AVG": (torch.add, np.add),
    "MIN": (torch.minimum, np.minimum),
    "MAX": (torch.maximum, np.maximum),
    "PRODUCT": (torch.mul, np.multiply),
}


_PERIOD = 65521  # a prime, so that a shift by a power of two never gives equal values


def data(seed: int, rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Equal on every machine and in every process. Floats are near 1 in size, some negative."""
    random = np.random.default_rng([seed, rank])
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if dtype in FLOATING:
        values = random.standard_normal(min(numel, _PERIOD))
        return _repeat(torch.from_numpy(values).to(dtype), numel)
    raw = random.integers(0, 256, min(numel, _PERIOD) * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    return _repeat(torch.from_numpy(raw), numel * dtype.itemsize).view(dtype)


def _repeat(values: torch.Tensor, numel: int) -> torch.Tensor:
    if numel <= values.numel():
        return values
    return values.repeat(-(-numel // values.numel()))[:numel].clone()


def reduced(
    inputs: Sequence[torch.Tensor], layout: str, operation: str, owner: int | None
) -> torch.Tensor:
    """The reduction of all ranks' tensors, as computed on the host of rank ``owner``.

    None: in the one exchange of a small AllReduce.
    """
    dtype = inputs[0].dtype
    on_torch, on_numpy = _FOLD[operation]
    if dtype not in FLOATING:
        values = [tensor.numpy() for tensor in inputs]
        total = values[0]
        for value in values[1:]:
            total = on_numpy(total, value)
        return torch.from_numpy(np.ascontiguousarray(total)).clone()
    wide = torch.float32 if dtype in HALF else dtype
    unrounded = owner is None or os.environ.get("SMDDP_REDUCE_PRECISION") == "fp32"
    sums = []
    for ranks in layouts.hosts(layout):
        part = inputs[ranks[0]].to(wide)
        for rank in ranks[1:]:
            part = on_torch(part, inputs[rank].to(wide))
        sums.append(part if unrounded or owner in ranks else part.to(dtype).to(wide))
    result = sums[0]
    for part in sums[1:]:
        result = on_torch(result, part)
    if operation == "AVG":
        result = result / len(inputs)
    return result.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, also of NaNs and of types without arithmetic."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy at an aligned address."""
    return raw(tensor).clone().view(tensor.dtype)
