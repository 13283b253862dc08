"""``deepspeed_smddp.monitored_barrier`` names who has not come, and breaks nothing."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_smddp
from harness.worker import Context, Failure
from harness.world import World, fresh


def meet(
    ctx: Context,
    absent: tuple[int, ...] = (),
    every: bool = False,
    members: tuple[int, ...] = (),
    seconds: float = 2.0,
) -> str:
    """What the barrier raised on this rank; then whether the group still sums."""
    group = dist.new_group(list(members)) if members else None
    said = ""
    if ctx.rank not in absent:
        try:
            deepspeed_smddp.monitored_barrier(group, timedelta(seconds=seconds), every)
        except RuntimeError as error:
            said = str(error)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == ctx.size
    return said


def keys(ctx: Context) -> int:
    return dist.distributed_c10d._get_default_store().num_keys()  # type: ignore[attr-defined]


def settled_keys(world: World) -> int:
    """Once those of the group's start have gone, which its ranks remove a moment later."""
    count, before = world.run(keys)[0], -1
    while count != before:
        time.sleep(1.0)
        before, count = count, world.run(keys)[0]
    return count


@pytest.mark.parametrize("layout", ["A", "AAA", "AABB"])
def test_all_come(layout: str) -> None:
    with fresh(layout) as world:
        for _ in range(2):
            assert world.run(meet) == [""] * len(layout)
        before = settled_keys(world)
        for _ in range(5):
            assert world.run(meet) == [""] * len(layout)
        assert settled_keys(world) == before  # the last call's stay


def late(ctx: Context) -> float:
    if ctx.rank == 2:
        time.sleep(1.0)
    began = time.monotonic()
    deepspeed_smddp.monitored_barrier()
    return time.monotonic() - began


def test_none_goes_on_before_the_last_has_come() -> None:
    with fresh("AABB") as world:
        seconds = world.run(late)
        assert all(seconds[rank] > 0.8 for rank in (0, 1, 3)), seconds


@pytest.mark.parametrize(
    ("absent", "every", "names"),
    [
        ((2,), False, "rank 2 has"),
        ((1, 3), False, "rank 1 has"),
        ((1, 3), True, "rank 1, rank 3 have"),
        ((0,), False, "rank 0 has"),
    ],
)
def test_who_has_not_come_is_named_and_the_group_goes_on(
    absent: tuple[int, ...], every: bool, names: str
) -> None:
    wanted = f"smddp: {names} not called monitored_barrier within 2 s"
    with fresh("AABB") as world:
        assert world.run(meet, absent, every) == [
            "" if rank in absent else wanted for rank in range(4)
        ]


def test_ranks_of_a_further_group_are_named_by_their_numbers_in_the_job() -> None:
    with fresh("AAAA") as world:
        said = world.run(meet, (3,), True, (1, 2, 3))
        assert said[0] == said[3] == ""
        assert said[1] == said[2] and "rank 3 has not called" in said[1]


def test_a_killed_rank_is_named() -> None:
    with fresh("AABB") as world:
        world.run(meet)
        world.signal(3, signal.SIGKILL)
        world.submit_to([0, 1, 2], meet_alone)
        outcomes: dict[int, Any] = world.outcomes([0, 1, 2])
        for rank in (0, 1, 2):
            assert isinstance(outcomes[rank], Failure)
            assert "rank 3 has not called monitored_barrier" in outcomes[rank].message


def meet_alone(ctx: Context) -> None:
    deepspeed_smddp.monitored_barrier(timeout=timedelta(seconds=2))
