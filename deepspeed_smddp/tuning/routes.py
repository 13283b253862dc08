"""``"auto"`` in ``smddp.routes``: which sizes of a collective the fallback carries faster.

The first operation of a group whose route is "auto" measures both on that very group, in about a
second, or finds what an earlier job has measured. All ranks come to the same steps, as they rest on
the times of the slowest rank. On GPUs a collective is timed beside matmuls that take about as long:
so the time that its call takes of the host, and the multiprocessors that it takes, count as they do
in a step of training. A group is a ``_C.ProcessGroupSMDDP``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_smddp.config.units import size_text
from deepspeed_smddp.errors import logger
from deepspeed_smddp.tuning import cache, measure
from deepspeed_smddp.tuning.cache import MeasuredRoutes, RoutePoint

BUDGET_SECONDS = {"cpu": 0.5, "cuda": 1.5}  # of one collective
SIZES = {"cpu": measure.SIZES["cpu"], "cuda": (*measure.SIZES["cuda"], 1 << 30)}
# The fallback takes a size only if it needs less than this share of smddp's time.
CLEARLY = {"cpu": 0.95, "cuda": 0.98}
FALLBACK = {"cpu": "gloo", "cuda": "nccl"}
BESIDE_MATMULS = ("cuda",)
MATMUL = 2048  # rows of the square matrices, bf16: some 25 us of an H100
FREE_SHARE = 16  # no buffer takes more than this part of the GPU's free memory

Step = tuple[int, str]  # bytes at most (0: no bound), route


def resolve(group: Any, collective: str, device: str) -> list[Step] | None:
    """The steps for ``collective`` on ``device``; collective, with equal results on all ranks.

    Returns:
        None if it can't be measured now, because a CUDA graph is recorded.
    """
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    began = time.perf_counter()
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else measure.CPU
    beside = None
    sizes = SIZES[device]
    if device in BESIDE_MATMULS:
        if why := _refusal(group, where):
            if group.rank() == 0:
                logger.warning("smddp: %s stays with smddp: %s", collective, why)
            return [(0, "smddp")]
        free = -measure.slowest([-_free_bytes(where)], group)[0]  # the least of all ranks
        sizes = tuple(size for size in sizes if size <= free / FREE_SHARE)
        beside = _Matmuls(group, where)

    def point(size: int) -> tuple[int, list[float]]:
        small, large = measure.buffers(size, group, where)

        def timed(compute: _Matmuls | None) -> list[float]:
            ways = [
                _way(group, collective, route, small, large, compute)
                for route in ("smddp", "fallback")
            ]
            return measure.times(ways, group, where, warm_up=2)

        found = timed(None)
        if beside is not None:
            beside.take(min(found))
            found = timed(beside)
        return large.nbytes, found

    def holds(known: MeasuredRoutes) -> bool:
        size, *times = known.points[len(known.points) // 2]
        return measure.is_close(point(size)[1], times)

    def measured(hosts: Sequence[str]) -> MeasuredRoutes:
        found = measure.within(BUDGET_SECONDS[device], sizes, point, group)
        points = [(nbytes, ours, theirs) for nbytes, (ours, theirs) in found]
        return MeasuredRoutes(collective, device, _place(hosts, where), points)

    known, source = cache.recall(
        group, where, cache.ROUTES, holds, measured, torch.__version__, collective, device
    )
    steps = choose(known.points, CLEARLY[device])
    if group.rank() == 0 and os.environ.get("RANK", "0") == "0":
        took = time.perf_counter() - began
        what = describe(steps, FALLBACK[device])
        # WARNING is the lowest level that a program without logging set-up shows.
        logger.warning("smddp: %s on %s, %s in %.2f s: %s", collective, device, source, took, what)
    return steps


def choose(points: Sequence[RoutePoint], clearly: float = CLEARLY["cpu"]) -> list[Step]:
    """Steps in rising order, the last one without a bound; bounds lie between measured sizes."""
    steps: list[Step] = []
    for number, (size, ours, theirs) in enumerate(points):
        last = number + 1 == len(points)
        bound = 0 if last else math.isqrt(size * points[number + 1][0])
        route = "fallback" if theirs < clearly * ours else "smddp"
        if steps and steps[-1][1] == route:
            steps.pop()
        steps.append((bound, route))
    return steps


def describe(steps: Sequence[Step], fallback: str) -> str:
    """One phrase: ``gloo up to 8192 bytes, then smddp``."""
    names = [fallback if route == "fallback" else route for _, route in steps]
    bounds = [f" up to {bound} bytes" if bound else "" for bound, _ in steps]
    return ", then ".join(name + bound for name, bound in zip(names, bounds, strict=True))


def sentence(known: MeasuredRoutes) -> str:
    """What was measured and what follows: ``all_gather on 4 ranks of one host: smddp; us ...``."""
    name = FALLBACK[known.device]
    steps = choose(known.points, CLEARLY[known.device])
    times = ", ".join(
        f"{size_text(size)} {ours * 1e6:.0f}/{theirs * 1e6:.0f}"
        for size, ours, theirs in known.points
    )
    return (
        f"{known.collective} on {known.where}: {describe(steps, name)}; us of smddp/{name}: {times}"
    )


def _place(hosts: Sequence[str], device: torch.device) -> str:
    count = len(set(hosts))
    gpu = f" with {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{len(hosts)} ranks of {'one host' if count == 1 else f'{count} hosts'}{gpu}"


class _Matmuls:
    """Matmuls on the current stream of a GPU, for about as long as was asked for."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._factor = torch.ones(MATMUL, MATMUL, dtype=torch.bfloat16, device=device)
        self._count = 8
        (seconds,) = measure.times([self.run], group, device, warm_up=2)
        self._seconds = seconds / self._count

    def take(self, seconds: float) -> None:
        self._count = max(1, round(seconds / self._seconds))

    def run(self) -> None:
        for _ in range(self._count):
            torch.mm(self._factor, self._factor)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


_tried: dict[str, str] = {}  # what _refusal() has found, by group, until that ends


def _refusal(group: Any, device: torch.device) -> str:
    """Why the fallback does not work on some rank; empty if it does. Collective; tried once."""
    name = group.rendezvous
    if name not in _tried:
        _tried[name] = _try_fallback(group, device)
        group.at_end(lambda: _tried.pop(name))
    return _tried[name]


def _try_fallback(group: Any, device: torch.device) -> str:
    why = ""
    small, large = measure.buffers(0, group, device)
    try:
        _way(group, "all_gather", "fallback", small, large)()
        measure.settle(device)
    except RuntimeError as error:
        group._force_route("smddp")
        why = str(error).strip().splitlines()[0][:200]
    (failed,) = measure.slowest([float(bool(why))], group)
    return f"the fallback failed: {why or 'on another rank'}" if failed else ""


def _way(
    group: Any,
    collective: str,
    route: str,
    small: torch.Tensor,
    large: torch.Tensor,
    beside: _Matmuls | None = None,
) -> Callable[[], None]:
    call: Callable[[], Any] = {
        "all_gather": lambda: group._allgather_base(large, small),
        "reduce_scatter": lambda: group._reduce_scatter_base(small, large),
        "all_reduce": lambda: group.allreduce([large]),
    }[collective]

    def run() -> None:
        group._force_route(route)
        work = call()
        if beside is not None:
            beside.run()
        work.wait()
        group._force_route("smddp")

    return run
