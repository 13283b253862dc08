"""What follows a death or a lost connection: slow ranks, groups that were left, new groups.

``test_faults.py`` has the faults themselves. Every operation has a deadline of 120 s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import worker
from harness.failing import at_once, collective, raised_by, survivors
from harness.resets import reset_connections
from harness.worker import Context, Failure
from harness.world import World, fresh

HEARD = 6.0  # seconds from a death to the last survivor's error
LAYOUTS = ("AB", "ABC", "AABB")
LONG = {"SMDDP_TIMEOUT_SECONDS": "120", "SMDDP_SILENCE_SECONDS": "30"}


def endless(ctx: Context, name: str) -> None:
    while True:
        collective(ctx, name, 300_000)


def heard(world: World, ranks: list[int], since: float, limit: float = HEARD) -> list[Failure]:
    """The errors of ``ranks``, all within ``limit`` seconds."""
    left = max(0.1, since + limit - time.monotonic())
    failures = raised_by(world, ranks, left)
    for failure in failures:
        assert failure.kind == "DistBackendError", failure.trace
    return failures


# ---- connections


def test_a_new_group_minds_no_connection_that_was_reset_before_it() -> None:
    with fresh("AB", env=LONG) as world:
        ranks = list(range(world.size))
        world.run(join_anew, ranks, "first", timeout=30)
        for turn in range(20):
            assert reset_connections(world.pid(0), world.pid(1)) > 0
            world.run(join_anew, ranks, f"turn {turn}", timeout=30)


# ---- a death before the first operation


def join_and_die(ctx: Context, victim: int, name: str) -> None:
    """The victim ends once it has the group, while others may still make it."""
    store = worker.connect(120)
    dist.init_process_group("smddp", store=store, rank=ctx.rank, world_size=ctx.size)
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "broadcast":
        dist.broadcast(torch.ones(1000), victim)
    else:
        collective(ctx, name)


@pytest.mark.parametrize("layout", ["AB", "AABB", "ABC", "ABCD"])
def test_a_death_before_the_first_operation_is_told_within_seconds(layout: str) -> None:
    names = itertools.cycle(("all_gather", "broadcast", "reduce_scatter", "all_reduce", "barrier"))
    worlds = {victim: World(layout, None, LONG) for victim in range(len(layout))}
    with contextlib.ExitStack() as stack:
        for world in worlds.values():
            stack.callback(world.close)
        for world in worlds.values():
            world.join()
        for victim, world in worlds.items():
            world.submit(join_and_die, victim, next(names))
        for victim, world in worlds.items():
            assert world.exit_status(victim, 60) == -signal.SIGKILL
            for failure in heard(world, survivors(world, victim), time.monotonic()):
                assert re.search(rf"\brank {victim}\b", failure.message), failure.message


# ---- silence


def hold_interpreter(ctx: Context, seconds: int) -> None:
    """The last rank computes without ever giving up the interpreter's lock."""
    collective(ctx)
    if ctx.rank == ctx.size - 1:
        ctypes.PyDLL(None).sleep(seconds)
    collective(ctx)


def test_a_rank_that_computes_and_holds_the_interpreter_is_waited_for() -> None:
    env: dict[str, str | None] = {"SMDDP_SILENCE_SECONDS": "2"}
    with at_once(((layout, layout) for layout in ("AAA", *LAYOUTS)), {**LONG, **env}) as worlds:
        for world in worlds.values():
            world.submit(hold_interpreter, 8)
        for world in worlds.values():
            world.collect(timeout=30)


def test_without_a_limit_silence_lasts_until_the_deadline() -> None:
    env: dict[str, str | None] = {"SMDDP_SILENCE_SECONDS": "0", "SMDDP_TIMEOUT_SECONDS": "7"}
    with fresh("AB", env={**LONG, **env}) as world:
        world.run(collective)
        world.signal(1, signal.SIGSTOP)
        world.submit_to([0], collective)
        began = time.monotonic()
        # The report waits for what the stopped rank would say; meanwhile it holds the error back.
        (failure,) = heard(world, [0], began, 35)
        assert time.monotonic() - began > 6
        assert "timed out after 7 s" in failure.message


# ---- groups that were left


def leave_after_a_death(ctx: Context, how: str) -> str:
    """Rank 1 hears of the last rank's death only by rank 0, which ends the group of both."""
    pair = dist.new_group([0, 1])
    dist.barrier()
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.rank == 0:
        try:
            dist.all_reduce(torch.ones(10))
        except RuntimeError:
            if how == "exit":
                atexit._run_exitfuncs()
                os._exit(1)
            dist.destroy_process_group(pair if how == "destroy" else None)
            time.sleep(3)
        return ""
    try:
        dist.all_reduce(torch.ones(10), group=pair)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the operation is complete without rank 0")


def test_a_rank_that_hears_only_of_a_consequence_is_told_the_cause() -> None:
    cases = (
        ((layout, how), layout)
        for layout in ("AAA", "ABC", "AAB")
        for how in ("destroy", "destroy all", "exit")
    )
    with at_once(cases, LONG) as worlds:
        for (_, how), world in worlds.items():
            world.submit(leave_after_a_death, how)
        for (layout, how), world in worlds.items():
            told = world.collect([1])[0]
            consequence = "ended" if how == "exit" else "has destroyed group"
            pattern = rf"rank 0\b.* {consequence}.*, after a failure: .*rank 2\b"
            assert re.search(pattern, told), (layout, told)


def leave_twice(ctx: Context) -> str:
    """Rank 0 ends its second group while it still answers for its first one."""
    join_anew(ctx, [0, 1], "first")
    dist.destroy_process_group()
    time.sleep(2)
    join_anew(ctx, [0, 1], "second")
    if ctx.rank == 0:
        dist.destroy_process_group()
        time.sleep(6)
        return ""
    time.sleep(1.5)  # asks after a second or so: once the seconds of the first end are over
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the operation is complete without rank 0")


def test_a_rank_answers_as_long_after_its_second_last_group_as_after_its_first() -> None:
    with fresh("AB", env=LONG) as world:
        assert "rank 0 (host-A) has destroyed group '0'" in world.run(leave_twice)[1]


# ---- new groups after a failure


def join_anew(ctx: Context, ranks: list[int], name: str) -> None:
    """A new default group of ``ranks`` in the same interpreter, and every collective over it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = worker.connect(30)
    dist.init_process_group(
        "smddp",
        store=dist.PrefixStore(name, store),
        rank=ranks.index(ctx.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=30),
    )
    n = len(ranks)
    for numel in (10, 30_000, 1_000_000):
        for round_ in range(3):
            value = torch.full((numel,), float(ranks.index(ctx.rank) + round_))
            gathered = torch.zeros(numel * n)
            dist.all_gather_into_tensor(gathered, value)
            wanted = torch.arange(n).repeat_interleave(numel) + float(round_)
            assert torch.equal(gathered, wanted)
            dist.all_reduce(value)
            assert bool((value == sum(range(n)) + n * round_).all())


def test_survivors_of_a_death_make_a_new_group() -> None:
    with at_once(((layout, layout) for layout in LAYOUTS), LONG) as worlds:
        for world in worlds.values():
            world.submit(endless, "all_reduce")
        time.sleep(0.5)
        for world in worlds.values():
            began = time.monotonic()
            world.signal(world.size - 1, signal.SIGKILL)
            rest = survivors(world, world.size - 1)
            heard(world, rest, began)
            world.submit_to(rest, join_anew, rest, "again")
        for world in worlds.values():
            world.collect(survivors(world, world.size - 1), timeout=30)


def test_all_make_a_new_group_after_one_was_silent() -> None:
    with fresh("ABC", env={**LONG, "SMDDP_SILENCE_SECONDS": "2"}) as world:
        world.submit(endless, "all_gather")
        time.sleep(0.5)
        began = time.monotonic()
        world.signal(2, signal.SIGSTOP)
        heard(world, [0, 1], began)
        world.signal(2, signal.SIGCONT)
        heard(world, [2], time.monotonic())
        world.run(join_anew, [0, 1, 2], "again", timeout=30)
