"""Many groups: overlapping, in flight together, made and destroyed, together with gloo's."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import cases
from harness.cases import Case
from harness.on_layouts import Body, OnLayouts
from harness.ports import free_port
from harness.worker import Context, connect
from harness.world import Pool, fresh

LAYOUTS = ("AAAA", "AABB", "ABAB", "ABCD")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
on = OnLayouts()


def make_groups(
    ctx: Context, members: list[list[int]]
) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """Every rank makes every group, as torch requires; returns the groups of this rank."""
    made = [(dist.new_group(ranks), ranks) for ranks in members]
    return [(group, ranks) for group, ranks in made if ctx.rank in ranks]


@on("AA", "AB", "AABB")
def ranks_may_start_different_groups_in_different_order(ctx: Context) -> None:
    """Half of the ranks start on one group first, the other ranks on the other group."""
    first, second = (dist.new_group(list(range(ctx.size))) for _ in range(2))
    ranks = list(range(ctx.size))
    case = Case("all_reduce", "base", torch.float32, (200_000,))
    for turn in range(5):
        pair = (first, second) if (ctx.rank + turn) % 2 else (second, first)
        running = [cases.begin(ctx, case, group, ranks) for group in pair]
        for one in running:
            one.finish()
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


@on("AA", "AB", "AABB")
def groups_used_by_several_threads(ctx: Context) -> None:
    """Each thread has a group of its own, independent of the other threads."""
    ranks, threads = list(range(ctx.size)), 4
    groups = [dist.new_group(ranks) for _ in range(threads)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(15):
                collective = COLLECTIVES[(index + turn) % 3]
                case = Case(collective, "base", torch.float32, (1000 + turn,), seed=index)
                cases.check(ctx, case, groups[index], ranks)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    if errors:
        raise errors[0]


def open_files(_: Context) -> int:
    return len(os.listdir("/proc/self/fd"))


def threads_of_process(_: Context) -> int:
    return len(os.listdir("/proc/self/task"))


def twenty_groups(ctx: Context) -> None:
    ranks = list(range(ctx.size))
    groups = [dist.new_group(ranks) for _ in range(20)]
    running = [
        cases.begin(ctx, Case(COLLECTIVES[i % 3], "base", torch.float32, (500,), seed=i), g, ranks)
        for i, g in enumerate(groups)
    ]
    for one in running:
        one.finish()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", ["AA", "AABB", "ABC"])
def test_twenty_groups_made_and_destroyed_leave_nothing(worlds: Pool, layout: str) -> None:
    world = worlds(layout)
    world.run(twenty_groups)  # the process makes its connections and buffers once
    time.sleep(2)  # threads that complete futures, or tidy the store, end after a second
    before = world.run(open_files) + world.run(threads_of_process)
    world.run(twenty_groups)
    world.run(twenty_groups)
    end = time.monotonic() + 10
    while (now := world.run(open_files) + world.run(threads_of_process)) != before:
        assert time.monotonic() < end, (before, now)
        time.sleep(0.2)
    world.run(cases.check, Case("all_reduce"))


def a_job(ctx: Context, backend: str, port: int) -> weakref.ref[Any]:
    """The life of a job's default group; a reference to what its caller held meanwhile."""

    class Held: ...

    held = Held()
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=ctx.rank, world_size=ctx.size
    )
    further = dist.new_group()
    for group in (None, further):
        dist.all_reduce(torch.ones(1000), group=group)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    dist.barrier()
    dist.destroy_process_group()
    return weakref.ref(held)


def jobs_one_after_the_other(ctx: Context, ports: list[int]) -> list[str]:
    """What a job leaves to the next, without the collector of cycles."""
    gc.collect()
    gc.disable()
    a_job(ctx, "gloo", ports[0])
    time.sleep(1)
    # The memory of tensors that ranks share, and the word that wakes a report, stay for good.
    most = open_files(ctx) + 2, threads_of_process(ctx)
    left = []
    for port in ports[1:]:
        if a_job(ctx, "smddp", port)() is not None:
            left.append("what the caller of init_process_group held")
        with socket.socket() as listener:
            if ctx.rank == 0:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
        until = time.monotonic() + 10
        while (files := open_files(ctx)) > most[0] or threads_of_process(ctx) > most[1]:
            if time.monotonic() > until:
                left.append(
                    f"{files} descriptors, {threads_of_process(ctx)} threads; {most} before"
                )
                break
            time.sleep(0.1)
    return left


def test_after_its_last_group_a_process_is_as_before_its_first() -> None:
    for layout in ("AA", "AB"):
        with fresh(layout, backend=None) as world:
            ports = [free_port() for _ in range(4)]
            assert world.run(jobs_one_after_the_other, ports, timeout=90) == [[]] * world.size


def job_over_the_store(ctx: Context) -> None:
    store = dist.PrefixStore("job", connect(60))
    dist.init_process_group("smddp", store=store, rank=ctx.rank, world_size=ctx.size)
    for group in (None, dist.new_group()):
        dist.all_reduce(torch.ones(10), group=group)
    dist.destroy_process_group()


def test_a_job_leaves_no_key_in_the_store() -> None:
    for layout in ("AA", "AB"):
        with fresh(layout, backend=None) as world:
            world.run(job_over_the_store)
            assert world._store.num_keys() == 0, layout


def groups_that_no_operation_uses(ctx: Context) -> None:
    store = dist.PrefixStore("job", connect(60))
    dist.init_process_group("smddp", store=store, rank=ctx.rank, world_size=ctx.size)
    dist.new_group()
    dist.new_group([0, ctx.size - 1])
    dist.destroy_process_group()


def test_a_group_that_was_never_used_leaves_no_key_either() -> None:
    for layout in ("AB", "AABB", "ABC"):
        with fresh(layout, backend=None) as world:
            world.run(groups_that_no_operation_uses)
            until = time.monotonic() + 10  # another thread removes them
            while world._store.num_keys() > 0 and time.monotonic() < until:
                time.sleep(0.05)
            assert world._store.list_keys() == [], layout


@on("AAB")
def gloo_groups_together_with_smddp_groups(ctx: Context) -> None:
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    ours = dist.new_group([0, 1])
    for turn in range(10):
        t = torch.full((50,), float(ctx.rank))
        work = dist.all_reduce(t, group=gloo, async_op=True)
        cases.check(ctx, Case("all_gather", seed=turn))
        if ctx.rank < 2:
            cases.check(ctx, Case("all_reduce", seed=turn), ours, [0, 1])
        work.wait()
        assert t[0] == sum(range(ctx.size))
    dist.destroy_process_group(gloo)
    if ctx.rank < 2:
        dist.destroy_process_group(ours)


@on("AAAA", "ABAB")
def groups_made_by_their_members_only(ctx: Context) -> None:
    """use_local_synchronization: only the members of a group take part in making it."""
    ranks = [0, 2] if ctx.rank % 2 == 0 else [1, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    cases.check(ctx, Case("reduce_scatter", "base", torch.float64, (91,)), group, ranks)
    dist.destroy_process_group(group)


@on("AB")
def backend_named_per_device(ctx: Context) -> None:
    """A backend per device, in the syntax of jobs with GPUs."""
    group = dist.new_group(backend="cpu:smddp")
    cases.check(ctx, Case("all_gather", dtype=torch.bfloat16), group)
    dist.destroy_process_group(group)


def of_many_ranks(ctx: Context) -> None:
    everyone = list(range(ctx.size))
    for collective in COLLECTIVES:
        case = Case(collective, "base", torch.float32, (777,))
        cases.check(ctx, case, dist.group.WORLD, everyone)
    for group, ranks in make_groups(ctx, [everyone[1:], everyone[3:11]]):
        cases.check(ctx, Case("all_gather", "base", torch.float32, (777,)), group, ranks)
        dist.destroy_process_group(group)


@pytest.mark.rare
@pytest.mark.slow
def test_more_ranks_than_read_what_each_has_published(worlds: Pool) -> None:
    """Above 32 ranks, rank 0 and the first rank of each host hand on what the ranks are."""
    worlds("AB" * 12 + "CD" * 5).run(of_many_ranks)


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)
