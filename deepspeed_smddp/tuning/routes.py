"""``"auto"`` in ``smddp.routes``: which sizes of a collective the fallback carries faster.

The first operation of a group whose route is "auto" measures both on that very group, in a fraction
of a second, or finds what an earlier job has measured. All ranks come to the same steps, as they
rest on the times of the slowest rank. A group is a ``_C.ProcessGroupSMDDP``: torch's stubs lack the
methods that every backend has.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.errors import logger
from deepspeed_smddp.tuning import cache, startup
from deepspeed_smddp.version import __version__

SIZES = tuple(4096 << (2 * i) for i in range(7))  # bytes of the whole tensor: 4 KiB to 16 MiB
BUDGET_SECONDS = 0.5  # of one collective
PER_SIZE_SECONDS = 0.03
ROUNDS = (3, 15)
# The fallback takes a size only if it needs less than this share of smddp's time.
CLEARLY = 0.95
# A stored measurement is made anew if a size now takes more or less time by this factor.
STALE = 2.0

Point = tuple[int, float, float]  # bytes, seconds over smddp, seconds over the fallback
Step = tuple[int, str]  # bytes at most (0: no bound), route


def resolve(group: Any, collective: str, device: str) -> list[Step] | None:
    """The steps for ``collective`` on ``device``; collective, with equal results on all ranks.

    Returns:
        None if it can't be measured now, because a CUDA graph is recorded.
    """
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    began = time.perf_counter()
    meter = Meter(group, collective, device)
    name = _name(group, collective, device)
    points = _shared(cache.load_routes(name) if group.rank() == 0 else None, group)
    source = "recalled"
    if points is None or not meter.confirms(points[len(points) // 2]):
        source = "measured"
        points = meter.measure()
        if group.rank() == 0:
            cache.store_routes(name, points)
    steps = choose(points)
    if group.rank() == 0 and os.environ.get("RANK", "0") == "0":
        took = time.perf_counter() - began
        what = describe(steps, "nccl" if device == "cuda" else "gloo")
        # WARNING is the lowest level that a program without logging set-up shows.
        logger.warning("smddp: %s on %s, %s in %.2f s: %s", collective, device, source, took, what)
    return steps


def choose(points: Sequence[Point]) -> list[Step]:
    """Steps in rising order, the last one without a bound; bounds lie between measured sizes."""
    steps: list[Step] = []
    for number, (size, ours, theirs) in enumerate(points):
        last = number + 1 == len(points)
        bound = 0 if last else math.isqrt(size * points[number + 1][0])
        route = "fallback" if theirs < CLEARLY * ours else "smddp"
        if steps and steps[-1][1] == route:
            steps.pop()
        steps.append((bound, route))
    return steps


def describe(steps: Sequence[Step], fallback: str) -> str:
    """One phrase: ``gloo up to 8192 bytes, then smddp``."""
    names = [fallback if route == "fallback" else route for _, route in steps]
    bounds = [f" up to {bound} bytes" if bound else "" for bound, _ in steps]
    return ", then ".join(name + bound for name, bound in zip(names, bounds, strict=True))


class Meter:
    """Times one collective of a group over both ways, in turns."""

    def __init__(self, group: Any, collective: str, device: str) -> None:
        self.group, self.device = group, device
        self._call: Callable[[torch.Tensor, torch.Tensor], Any] = {
            "all_gather": lambda small, large: group._allgather_base(large, small),
            "reduce_scatter": lambda small, large: group._reduce_scatter_base(small, large),
            "all_reduce": lambda small, large: group.allreduce([large]),
        }[collective]

    def measure(self) -> list[Point]:
        """All sizes that fit the budget; the two smallest are always measured."""
        points: list[Point] = []
        spent = 0.0
        for size in SIZES:
            if len(points) >= 2:
                expected = 4 * (points[-1][1] + points[-1][2]) * (1 + ROUNDS[0])
                if spent + expected > BUDGET_SECONDS:
                    break
            began = time.perf_counter()
            points.append(self.point(size))
            spent = self._slowest(spent + time.perf_counter() - began)[0]
        return points

    def confirms(self, point: Point) -> bool:
        """Whether a stored point is about as fast as it was."""
        _, *now = self.point(point[0])
        ratios = [is_now / was for is_now, was in zip(now, point[1:], strict=True)]
        return all(1 / STALE < ratio < STALE for ratio in ratios)

    def point(self, size: int) -> Point:
        """The medians of the slowest rank."""
        ranks = self.group.size()
        numel = max(32, size // 2 // ranks // 32 * 32)
        small = torch.zeros(numel, dtype=torch.bfloat16, device=self.device)
        large = torch.zeros(numel * ranks, dtype=torch.bfloat16, device=self.device)
        first = self._round(small, large)  # connects, and maps memory
        first = self._slowest(*self._round(small, large))
        rounds = min(max(int(PER_SIZE_SECONDS / sum(first)), ROUNDS[0]), ROUNDS[1])
        times = [self._round(small, large) for _ in range(rounds)]
        medians = [sorted(column)[rounds // 2] for column in zip(*times, strict=True)]
        ours, theirs = self._slowest(*medians)
        return large.nbytes, ours, theirs

    def _round(self, small: torch.Tensor, large: torch.Tensor) -> list[float]:
        seconds = []
        for route in ("smddp", "fallback"):
            self.group._force_route(route)
            self._settle()
            began = time.perf_counter()
            self._call(small, large).wait()
            self._settle()
            seconds.append(max(1e-9, time.perf_counter() - began))
        self.group._force_route("smddp")
        return seconds

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, *seconds: float) -> list[float]:
        values = torch.tensor(seconds, dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.group.allreduce([values], options).wait()
        return [float(value) for value in values]


def _name(group: Any, collective: str, device: str) -> str:
    what = [__version__, torch.__version__, collective, device]
    if device == "cuda":
        what.append(torch.cuda.get_device_name())
    return cache.topology(" ".join(what), startup.hosts(group))


def _shared(points: list[Point] | None, group: Any) -> list[Point] | None:
    """What the first rank has found, on all ranks."""
    found = startup.shared(json.dumps(points).encode(), group)
    return None if found is None else [(int(p[0]), float(p[1]), float(p[2])) for p in found]
