"""Times collectives of a group: what "auto" rests on, for bucket sizes and for routes.

A time is that of the slowest rank, so that all ranks have the same: the median of a few, where two
ways are compared, and the shortest for a network model, as what else a machine does only adds to
it. A group is torch's, or the ``_C.ProcessGroupSMDDP`` in it: both have the methods that are called
here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_smddp.tuning import cache
from deepspeed_smddp.tuning.choice import NetworkModel, Point

# Bytes of all ranks' shards: 4 KiB to 16 MiB, on GPUs to 256 MiB.
SIZES = {"cpu": tuple(4096 << (2 * i) for i in range(7))}
SIZES["cuda"] = tuple(4096 << (2 * i) for i in range(9))
CPU = torch.device("cpu")
BUDGET_SECONDS = 1.2
# A stored time is measured anew if the operation now takes more or less by this factor.
STALE = 2.0
# By group and type of device.
_networks: WeakKeyDictionary[dist.ProcessGroup, dict[str, NetworkModel]] = WeakKeyDictionary()
# A stored model holds if one of so many times is near: on a busy machine others are not.
_PROBES = 4
_PER_SIZE_SECONDS = 0.03
_REPETITIONS = (3, 15)
# What limits a network's rate often lets a burst pass at once, and a small operation with it: as
# many are timed in a row as move so many bytes, or take so many seconds.
_ROW_BYTES = 1 << 20
_ROW_SECONDS = 0.005


def measure(group: Any, budget: float = BUDGET_SECONDS, device: torch.device = CPU) -> NetworkModel:
    """Measures a group's network model for tensors of this rank's ``device``; collective."""

    before = 1e-4  # seconds that the size before took

    def point(size: int) -> tuple[int, list[float]]:
        nonlocal before
        small, large = buffers(size, group, device)
        count = in_a_row(large.nbytes, before) if device.type == "cpu" else 1
        found = []
        for way in (
            _gather(small, large, group),
            lambda: group.reduce_scatter_tensor_coalesced([small], [large]).wait(),
        ):
            found += times([_repeated(way, count)], group, device, of=min)
        found = [seconds / count for seconds in found]
        before = max(found)
        return large.nbytes, found

    found = within(budget, SIZES[device.type], point, group)
    return NetworkModel(
        tuple(Point(nbytes, seconds[0]) for nbytes, seconds in found),
        tuple(Point(nbytes, seconds[1]) for nbytes, seconds in found),
    )


def in_a_row(size: int, before: float) -> int:
    """How many operations of a size are timed as one; a smaller one takes ``before`` seconds."""
    return max(1, min(_ROW_BYTES // size, int(_ROW_SECONDS / before)))


def find(group: dist.ProcessGroup, device: torch.device = CPU) -> tuple[NetworkModel, str]:
    """The group's network model, and whether it was ``measured`` or ``recalled``; collective."""
    known = _networks.setdefault(group, {})
    if device.type in known:
        return known[device.type], "recalled"

    known[device.type], origin = cache.recall(
        group,
        device,
        cache.NETWORK,
        lambda network: holds(network, lambda size: probe(group, size, device)),
        lambda _: measure(group, device=device),
    )
    return known[device.type], origin


def holds(network: NetworkModel, probe: Callable[[int], float]) -> bool:
    """Whether a stored network model holds; ``probe``: the seconds of an AllGather of a size."""
    middle = network.allgather[len(network.allgather) // 2]
    return any(is_close([probe(middle.size)], [middle.seconds]) for _ in range(_PROBES))


def probe(group: Any, size: int, device: torch.device = CPU) -> float:
    """Seconds of one AllGather of ``size`` bytes of output, measured as :func:`measure` does."""
    small, large = buffers(size, group, device)
    return times([_gather(small, large, group)], group, device, of=min)[0]


def is_close(now: Sequence[float], before: Sequence[float]) -> bool:
    """Whether operations take about the time that they took before."""
    return all(1 / STALE < a / b < STALE for a, b in zip(now, before, strict=True))


def buffers(size: int, group: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's shard, and that of all ranks together: about ``size`` bytes.

    The values are distributed like weights, as zeros would shrink to nothing where they are coded.
    """
    count = max(32, size // group.size() // 64 * 32)
    random = torch.Generator(device).manual_seed(0)
    small = torch.empty(count, dtype=torch.bfloat16, device=device).normal_(
        0, 0.02, generator=random
    )
    return small, small.repeat(group.size())


def within(
    budget: float, sizes: Sequence[int], point: Callable[[int], tuple[int, list[float]]], group: Any
) -> list[tuple[int, list[float]]]:
    """Points of as many sizes as fit the budget (seconds), the two smallest always; collective."""
    found: list[tuple[int, list[float]]] = []
    spent = 0.0
    for size in sizes:
        if len(found) >= 2 and spent + 4 * sum(found[-1][1]) * (1 + _REPETITIONS[0]) > budget:
            break
        began = time.perf_counter()
        found.append(point(size))
        (spent,) = slowest([spent + time.perf_counter() - began], group)
    return found


def times(
    ways: Sequence[Callable[[], Any]],
    group: Any,
    device: torch.device,
    warm_up: int = 1,
    of: Callable[[Sequence[float]], float] = statistics.median_high,
) -> list[float]:
    """Seconds of each way, which starts an operation and waits for it, called in turns; collective.

    ``warm_up`` turns before connect and map memory; the last of them says how many follow. ``of``:
    which of a way's times counts.
    """

    def turn() -> list[float]:
        found = []
        for way in ways:
            settle(device)
            began = time.perf_counter()
            way()
            settle(device)
            found.append(max(1e-9, time.perf_counter() - began))
        return found

    for _ in range(warm_up):
        first = turn()
    first = slowest(first, group)
    repetitions = min(max(int(_PER_SIZE_SECONDS / sum(first)), _REPETITIONS[0]), _REPETITIONS[1])
    turns = [turn() for _ in range(repetitions)]
    return slowest([of(each) for each in zip(*turns, strict=True)], group)


def settle(device: torch.device) -> None:
    """Waits until a GPU has done all that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: Sequence[float], group: Any) -> list[float]:
    """Of each number the largest of all ranks; collective."""
    values = torch.tensor(seconds, dtype=torch.float64)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([values], options).wait()
    return [float(value) for value in values]


def _repeated(way: Callable[[], Any], count: int) -> Callable[[], Any]:
    def row() -> None:
        for _ in range(count):
            way()

    return row


def _gather(small: torch.Tensor, large: torch.Tensor, group: Any) -> Callable[[], Any]:
    return lambda: group.allgather_into_tensor_coalesced([large], [small]).wait()
