"""Measures AllGather and ReduceScatter of a group, in under two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepspeed_smddp.tuning.choice import NetworkModel, Point

# Bytes of all ranks' shards: 4 KiB to 16 MiB, on GPUs to 256 MiB.
SIZES = {"cpu": tuple(4096 << (2 * i) for i in range(7))}
SIZES["cuda"] = tuple(4096 << (2 * i) for i in range(9))
CPU = torch.device("cpu")
BUDGET_SECONDS = 1.2
_PER_SIZE_SECONDS = 0.03
_REPETITIONS = (3, 15)

_Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]


def measure(
    group: dist.ProcessGroup, budget: float = BUDGET_SECONDS, device: torch.device = CPU
) -> NetworkModel:
    """Measures a group's network model for tensors of this rank's ``device``.

    Collective, with the same result on all ranks.

    The time of a size is the slowest rank's median. Larger sizes that would exceed the budget
    (seconds) are left out; the two smallest are always measured.
    """
    gather: list[Point] = []
    scatter: list[Point] = []
    spent = 0.0
    for size in SIZES[device.type]:
        expected = sum(points[-1].seconds for points in (gather, scatter) if points)
        if len(gather) >= 2 and spent + 4 * expected * (1 + _REPETITIONS[0]) > budget:
            break
        for points, operation in ((gather, _gather), (scatter, _scatter)):
            began = time.perf_counter()
            seconds = _median(operation, size, group, device)
            points.append(Point(_shard(size, group) * group.size(), seconds))
            spent = _slowest(spent + time.perf_counter() - began, group)
    return NetworkModel(tuple(gather), tuple(scatter))


def probe(group: dist.ProcessGroup, size: int, device: torch.device = CPU) -> float:
    """Seconds of one AllGather of ``size`` bytes of output, measured as :func:`measure` does."""
    return _median(_gather, size, group, device)


def _median(operation: _Call, size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    shard = _shard(size, group)
    small = _memory(shard // 2, device).zero_()
    large = _memory(shard // 2 * group.size(), device).zero_()
    first = _time(operation, small, large, group)
    first = _slowest(first, group)
    repetitions = min(max(int(_PER_SIZE_SECONDS / first), _REPETITIONS[0]), _REPETITIONS[1])
    times = sorted(_time(operation, small, large, group) for _ in range(repetitions))
    return _slowest(times[len(times) // 2], group)


def _memory(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.bfloat16, device=device)


def _time(
    operation: _Call, small: torch.Tensor, large: torch.Tensor, group: dist.ProcessGroup
) -> float:
    settle = torch.cuda.synchronize if small.is_cuda else lambda _: None
    settle(small.device)
    began = time.perf_counter()
    operation(small, large, group)
    settle(small.device)
    return max(1e-9, time.perf_counter() - began)


def _gather(small: torch.Tensor, large: torch.Tensor, group: dist.ProcessGroup) -> None:
    group.allgather_into_tensor_coalesced([large], [small]).wait()


def _scatter(small: torch.Tensor, large: torch.Tensor, group: dist.ProcessGroup) -> None:
    group.reduce_scatter_tensor_coalesced([small], [large]).wait()


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value.item())


def _shard(size: int, group: dist.ProcessGroup) -> int:
    return max(64, size // group.size() // 64 * 64)
