"""Ranks that die, come late or disagree: what they call, and what the others raise."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from harness.worker import Context, Failure
from harness.world import World, fresh


def collective(
    ctx: Context, name: str = "all_reduce", numel: int = 1000, group: Any = None
) -> None:
    small, large = torch.ones(numel), torch.ones(numel * ctx.size)
    if name == "all_gather":
        dist.all_gather_into_tensor(large, small, group=group)
    elif name == "reduce_scatter":
        dist.reduce_scatter_tensor(small, large, group=group)
    elif name == "all_reduce":
        dist.all_reduce(large, group=group)
        assert bool((large == ctx.size).all())
    else:
        dist.barrier(group)


@contextmanager
def at_once(
    cases: Iterable[tuple[Hashable, str]], env: dict[str, str | None] | None = None
) -> Iterator[dict[Any, World]]:
    """Several worlds side by side, by key, whose deadlines pass together: (key, layout)."""
    with ExitStack() as stack:
        yield {key: stack.enter_context(fresh(layout, env=env)) for key, layout in cases}


def survivors(world: World, victim: int) -> list[int]:
    return [rank for rank in range(world.size) if rank != victim]


def raised_by(world: World, ranks: list[int], limit: float) -> list[Failure]:
    """The exceptions of ``ranks``; fails if a rank returned or took longer."""
    outcomes = world.outcomes(ranks, timeout=limit)
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Failure), f"rank {rank} returned {outcome!r}"
    return list(outcomes.values())
