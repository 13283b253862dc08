"""``"auto"`` in ``smddp.routes``: which sizes of a collective the fallback carries faster.

The first operation of a group whose route is "auto" measures both on that very group, in a fraction
of a second, or finds what an earlier job has measured. All ranks come to the same steps, as they
rest on the times of the slowest rank. A group is a ``_C.ProcessGroupSMDDP``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_smddp.errors import logger
from deepspeed_smddp.tuning import cache, measure
from deepspeed_smddp.tuning.cache import RoutePoint

BUDGET_SECONDS = 0.5  # of one collective
# The fallback takes a size only if it needs less than this share of smddp's time.
CLEARLY = 0.95

Step = tuple[int, str]  # bytes at most (0: no bound), route


def resolve(group: Any, collective: str, device: str) -> list[Step] | None:
    """The steps for ``collective`` on ``device``; collective, with equal results on all ranks.

    Returns:
        None if it can't be measured now, because a CUDA graph is recorded.
    """
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    began = time.perf_counter()
    where = torch.device(device)

    def point(size: int) -> tuple[int, list[float]]:
        small, large = measure.buffers(size, group, where)
        ways = [_way(group, collective, route, small, large) for route in ("smddp", "fallback")]
        return large.nbytes, measure.times(ways, group, where, warm_up=2)

    def holds(points: list[RoutePoint]) -> bool:
        size, *times = points[len(points) // 2]
        return measure.is_close(point(size)[1], times)

    def measured() -> list[RoutePoint]:
        found = measure.within(BUDGET_SECONDS, measure.SIZES["cpu"], point, group)
        return [(nbytes, ours, theirs) for nbytes, (ours, theirs) in found]

    known, source = cache.recall(
        group, where, cache.ROUTES, holds, measured, torch.__version__, collective, device
    )
    steps = choose(known)
    if group.rank() == 0 and os.environ.get("RANK", "0") == "0":
        took = time.perf_counter() - began
        what = describe(steps, "nccl" if device == "cuda" else "gloo")
        # WARNING is the lowest level that a program without logging set-up shows.
        logger.warning("smddp: %s on %s, %s in %.2f s: %s", collective, device, source, took, what)
    return steps


def choose(points: Sequence[RoutePoint]) -> list[Step]:
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


def _way(
    group: Any, collective: str, route: str, small: torch.Tensor, large: torch.Tensor
) -> Callable[[], None]:
    call: Callable[[], Any] = {
        "all_gather": lambda: group._allgather_base(large, small),
        "reduce_scatter": lambda: group._reduce_scatter_base(small, large),
        "all_reduce": lambda: group.allreduce([large]),
    }[collective]

    def run() -> None:
        group._force_route(route)
        call().wait()
        group._force_route("smddp")

    return run
