"""Ranks of a step: processes that share the GPUs, with NCCL beside smddp where it works.

The step that looks at both comes first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpu_check import machine, place
from gpu_check.step import Run
from harness import host_device
from harness.variables import section
from harness.worker import Context
from harness.world import World, fresh

# By default smddp carries only what NCCL does not carry faster.
OURS = {"all_gather": "smddp", "reduce_scatter": "smddp", "all_reduce": "smddp"}
# Seconds that the ranks of a world may take for one function, and of those a collective.
DEADLINE, TIMEOUT = 200.0, 120


@contextlib.contextmanager
def world(run: Run, layout: str, **env: str | None) -> Iterator[World]:
    """Ranks on ``layout``'s hosts, one letter per rank, that are settled on the step's device."""
    timeout = min(TIMEOUT, run.step.limit // 2)
    variables: dict[str, str | None] = {"SMDDP_FALLBACK": "error", **section(routes=OURS)}
    variables["SMDDP_TIMEOUT_SECONDS"] = str(timeout)
    if run.device == "host":
        variables["SMDDP_DEVICE"] = "host"
    elif len(layout) > run.gpus:
        variables["LOCAL_RANK"] = "0"
    with fresh(
        layout, env={**variables, **env}, deadline=min(DEADLINE, 0.7 * run.step.limit)
    ) as ranks:
        ranks.run(place.settle, run.device)
        yield ranks


def layouts(run: Run) -> list[str]:
    """Hosts and ranks that the steps try: more ranks where there are more GPUs."""
    found = ["A", "AA", "AAAA", "AB", "ABC", "AABB", "AAB"]
    if run.gpus > 4:
        found.append("A" * run.gpus)
    return found


def beside_nccl(ctx: Context) -> tuple[Any, str]:
    """A group of all ranks over NCCL, or None and the reason; the same on all ranks.

    NCCL takes ranks that share a GPU for ranks of separate hosts if each has its own NCCL_HOSTID.
    Its bytes then pass through sockets: results count, speeds do not.
    """
    if place.here().name != "cuda":
        return None, "no GPU"
    if ctx.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{ctx.rank}"
    why = ""
    group = None
    try:
        group = dist.new_group(backend="nccl")
        value = torch.ones(8, device="cuda")
        dist.all_reduce(value, group=group)
        torch.cuda.synchronize()
    except Exception as error:  # what NCCL raises depends on its version
        why = str(error).strip().splitlines()[0][:200]
    works = torch.tensor([0 if why else 1])
    dist.all_reduce(works, dist.ReduceOp.MIN)
    return (group, "") if int(works) else (None, why or "NCCL failed on another rank")


def look(run: Run) -> None:
    """What the other steps rest on: their results are read beside these."""
    run.note("machine", machine.facts())
    with world(run, "AA", SMDDP_FALLBACK="warn") as ranks:
        run.note("paths", ranks.run(first_calls))
        run.note("nccl", ranks.run(try_nccl)[0])


def first_calls(ctx: Context) -> dict[str, int]:
    """The path of each collective; a fallback shows with its name."""
    here = place.here()
    if here.name == "cuda" and ctx.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{ctx.rank}"
    part, whole = here.empty(1024), here.empty(1024 * ctx.size)
    part.fill_(ctx.rank + 1)
    place.gather(whole, part).wait()
    place.scatter(part, whole).wait()
    place.reduce(part).wait()
    here.synchronize()
    return host_device.calls(ctx, 3)


def try_nccl(ctx: Context) -> Any:
    """``works``, or why not: several steps compare with NCCL where it works."""
    group, why = beside_nccl(ctx)
    return "works" if group is not None else why
