"""Dead, stopped, late and disagreeing ranks; a missing libfabric: no rank hangs, all get an error.

Each test has a world of its own, with a short deadline.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import cases
from harness.cases import Case
from harness.failing import at_once, collective, raised_by, survivors
from harness.worker import Context, Failure
from harness.world import fresh

DEADLINE = 3  # seconds, of an operation
SHORT = {"SMDDP_TIMEOUT_SECONDS": str(DEADLINE)}
GRACE = 3.0
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "barrier")
LAYOUTS = ("AAA", "AB", "AABB")


def assert_names(failures: list[Failure], victim: int, layout: str, operation: str) -> None:
    for failure in failures:
        assert f"rank {victim}" in failure.message, failure.message
        assert f"host-{layout[victim]}" in failure.message, failure.message
        others = [r for r in range(len(layout)) if r not in (victim, failure.rank)]
        blamed = [r for r in others if f"rank {r} " in failure.message.partition(":")[0]]
        assert not blamed, f"blames {blamed}: {failure.message}"
        assert operation in failure.message, failure.message
        assert failure.kind == "DistBackendError", failure.trace


def test_any_rank_may_be_killed() -> None:
    layout = "AABB"
    with at_once(((victim, layout) for victim in range(4)), SHORT) as worlds:
        for victim, world in worlds.items():
            world.run(collective, "all_gather")
            world.signal(victim, signal.SIGKILL)  # before any rank makes a call
            world.submit_to(survivors(world, victim), collective, "all_gather")
        for victim, world in worlds.items():
            failures = raised_by(world, survivors(world, victim), DEADLINE + GRACE)
            assert_names(failures, victim, layout, "all_gather")


def start_and_poll(ctx: Context) -> None:
    """No thread waits: the operation must fail even so."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    early = work.get_future()
    end = time.monotonic() + DEADLINE + GRACE
    while not work.is_completed():
        assert time.monotonic() < end, "neither done nor failed"
        time.sleep(0.02)
    assert not work.is_success()
    assert work.exception() is not None
    with pytest.raises(RuntimeError, match="all_reduce"):
        early.wait()  # a thread of its own completes it
    late = work.get_future()
    assert late.done()
    with pytest.raises(RuntimeError, match="all_reduce"):
        late.wait()
    work.wait()  # raises
    raise AssertionError("the work holds no error")


def several_in_flight(ctx: Context) -> list[str]:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(10)]
    messages = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_work_and_future_hold_the_error_and_everything_in_flight_fails() -> None:
    keys = [(layout, kind) for layout in LAYOUTS for kind in (start_and_poll, several_in_flight)]
    with at_once(((key, key[0]) for key in keys), SHORT) as worlds:
        for (_, kind), world in worlds.items():
            world.submit_to(survivors(world, 0), kind)
        time.sleep(0.3)
        for world in worlds.values():
            world.signal(0, signal.SIGKILL)
        for (layout, kind), world in worlds.items():
            rest = survivors(world, 0)
            if kind is start_and_poll:
                failures = raised_by(world, rest, DEADLINE + 2 * GRACE)
                assert_names(failures, 0, layout, "all_reduce")
                continue
            for messages in world.outcomes(rest, DEADLINE + GRACE).values():
                assert len(messages) == 10
                assert all("rank 0" in message for message in messages), messages


# ---- ranks that call different things


def disagree(ctx: Context, kind: str) -> None:
    """A call that differs on rank 0, on a group of its own."""
    group = ctx.groups[kind] = dist.new_group()
    odd = ctx.rank == 0
    n = ctx.size
    if kind == "operation":
        collective(ctx, "all_gather" if odd else "reduce_scatter", group=group)
    elif kind == "operation and barrier":
        collective(ctx, "barrier" if odd else "all_reduce", group=group)
    elif kind == "size":
        count = 64 if odd else 96
        dist.all_gather_into_tensor(torch.zeros(count * n), torch.zeros(count), group=group)
    elif kind == "large size":
        dist.all_reduce(torch.zeros(1_000_000 if odd else 1_000_001), group=group)
    elif kind == "type":
        dtype = torch.int32 if odd else torch.float32
        dist.all_reduce(torch.zeros(64, dtype=dtype), group=group)
    elif kind == "type moved":
        dtype = torch.int32 if odd else torch.float32
        whole, part = torch.zeros(64 * n, dtype=dtype), torch.zeros(64, dtype=dtype)
        dist.all_gather_into_tensor(whole, part, group=group)
    elif kind == "splits":
        count = n * (64 if odd else 96)
        dist.all_to_all_single(torch.zeros(count), torch.zeros(count), group=group)
    elif kind == "reduction":
        op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        dist.all_reduce(torch.zeros(64), op=op, group=group)
    else:
        sizes = (30, 70) if odd else (50, 50)
        with dist.distributed_c10d._coalescing_manager(group=group):
            for size in sizes:
                whole, part = torch.zeros(size * n), torch.zeros(size)
                dist.all_gather_into_tensor(whole, part, group=group)


MISMATCHES = {
    "operation": ("all_gather", "reduce_scatter"),
    "operation and barrier": ("barrier", "all_reduce"),
    "size": ("{256} bytes in all", "{384} bytes in all"),
    "large size": (),
    "type": ("int32", "float32"),
    "type moved": ("int32", "float32"),
    "reduction": ("max", "sum"),
    "splits": ("256 bytes", "384 bytes", "which takes"),
    "segments": ("in 2 tensors, float32) with tensors of other sizes",),
}


def call_once_more(ctx: Context, kind: str) -> None:
    """The group says at once that it is broken; the others work."""
    began = time.monotonic()
    try:
        collective(ctx, group=ctx.groups[kind])
    except RuntimeError as error:
        assert time.monotonic() - began < GRACE
        assert len(str(error)) > 20, error
    else:
        raise AssertionError("a broken group has carried out a call")
    for seed in range(3):
        cases.check(ctx, Case("all_gather", seed=seed))
        cases.check(ctx, Case("reduce_scatter", seed=seed))
    dist.destroy_process_group(ctx.groups.pop(kind))


@pytest.mark.parametrize("layout", ["AA", "AB", "AABB"])
def test_a_mismatch_raises_everywhere_and_shows_both_sides(layout: str) -> None:
    with fresh(layout, env=SHORT) as world:
        for kind, sides in MISMATCHES.items():
            began = time.monotonic()
            failures = world.failures(disagree, kind, timeout=DEADLINE + GRACE)
            late = "found by the deadline, not by the comparison"
            assert time.monotonic() - began < DEADLINE, (kind, late)
            for failure in failures:
                assert failure.kind == "DistBackendError", failure.trace
                for side in (*sides, "rank 0"):  # with the bytes of a rank in braces
                    of_all = re.sub(r"{(\d+)}", lambda of: str(int(of[1]) * world.size), side)
                    assert of_all in failure.message, failure.message
            world.run(call_once_more, kind)


# ---- abort


def abort_while_waiting(ctx: Context) -> str:
    """Rank 0 never starts the operation; the others abort it after half a second."""
    if ctx.rank == 0:
        return "absent"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    timer = threading.Timer(0.5, backend.abort)
    timer.start()
    began = time.monotonic()
    try:
        collective(ctx, "all_reduce")
    except RuntimeError as error:
        assert time.monotonic() - began < 2.5, "abort did not end the wait"
        return str(error)
    raise AssertionError("the operation is complete without rank 0")


@pytest.mark.alone
def test_abort_ends_a_wait() -> None:
    env: dict[str, str | None] = {"SMDDP_TIMEOUT_SECONDS": "20"}
    with at_once(((layout, layout) for layout in LAYOUTS), env) as worlds:
        for world in worlds.values():
            messages = world.run(abort_while_waiting, timeout=15)
            assert messages[0] == "absent"
            assert all("abort" in message for message in messages[1:]), messages
            # Rank 0 gets the error at its own call.
            world.submit_to([0], collective, "all_reduce")
            (failure,) = raised_by(world, [0], 10)
            assert "abort" in failure.message


def abort_and_leave(ctx: Context) -> str:
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    return "left"


def test_torch_abort_process_group() -> None:
    with fresh("AAB", env=SHORT) as world:
        world.run(collective, "all_gather")
        assert world.run(abort_and_leave) == ["left"] * 3


# ---- sentences of a group of some ranks name them by their ranks in the job

MEMBERS, VICTIM = [3, 1, 2], 1


def fail_in_a_part(ctx: Context, how: str) -> str:
    """A group of the ranks 3, 1, 2 of four, on which its second rank fails."""
    if how == "comes too late" and ctx.rank == VICTIM:
        return ""
    part = dist.new_group(MEMBERS, timeout=timedelta(seconds=4), use_local_synchronization=True)
    if ctx.rank not in MEMBERS:
        return ""
    if ctx.rank == VICTIM:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is late":
            time.sleep(DEADLINE * 1.5)
    tensor = torch.ones(1000, dtype=torch.int32 if ctx.rank == VICTIM else torch.float32)
    dist.all_reduce(tensor if how == "disagrees" else tensor.float(), group=part)
    return "no error"


@pytest.mark.parametrize("layout", ["AAAA", "ABAB", "ABBC"])
def test_sentences_of_a_part_name_ranks_of_the_job(layout: str) -> None:
    kinds = ("dies", "is late", "disagrees", "comes too late")
    with at_once(((how, layout) for how in kinds), SHORT) as worlds:
        for how, world in worlds.items():
            world.submit(fail_in_a_part, how)
        for how, world in worlds.items():
            for failure in raised_by(world, [2, 3], 2 * DEADLINE + 3 * GRACE):
                named = {int(rank) for rank in re.findall(r"ranks? (\d+)", failure.message)}
                assert VICTIM in named or (how == "disagrees" and named), failure.message
                assert named <= set(MEMBERS), failure.message


# ---- time limits of torch


def own_limit(ctx: Context) -> float:
    group = dist.new_group(list(range(ctx.size)), timeout=timedelta(seconds=2))
    if ctx.rank == 0:
        time.sleep(5)
        return 0.0
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except RuntimeError:
        return time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.alone
def test_a_group_with_its_own_time_limit() -> None:
    """torch's limit applies if SMDDP_TIMEOUT_SECONDS is not set."""
    env: dict[str, str | None] = {"SMDDP_TIMEOUT_SECONDS": None}
    with at_once(((layout, layout) for layout in ("AA", "AB")), env) as worlds:
        for world in worlds.values():
            world.submit(own_limit)
        for world in worlds.values():
            _, seconds = world.collect(timeout=20)
            assert 1.5 < seconds < 4.5


# ---- libfabric


@pytest.mark.parametrize("layout", ["A", "AAA"])
def test_without_libfabric_one_host_works(layout: str) -> None:
    with fresh(layout, env={"SMDDP_LIBFABRIC": "/nonexistent"}) as world:
        for name in COLLECTIVES[:3]:
            world.run(cases.check, Case(name, dtype=torch.bfloat16, numels=(9457,)))
