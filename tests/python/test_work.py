"""Asynchronous and synchronous operations: Work, waits, threads."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import cases, model
from harness.failing import at_once
from harness.on_layouts import Body, OnLayouts
from harness.worker import Context
from harness.world import Pool

LAYOUTS = ("AA", "AB", "AABB")
on = OnLayouts()


@on(*LAYOUTS)
def work_api(ctx: Context) -> None:
    work, out, wanted = cases.start_all_gather(ctx)
    assert work.wait() is True
    assert work.wait() is True, "a second wait"
    assert work.is_completed() and work.is_success()
    assert work.exception() is None
    assert torch.equal(out, wanted)
    tensors = work.result()
    assert any(model.same_bits(t.reshape(-1), out) for t in tensors)
    work.synchronize()


def calls_without_work(ctx: Context) -> list[tuple[str, Any]]:
    """Each of smddp's operations as a synchronous call on the group itself."""
    from torch.distributed import distributed_c10d as c10d

    group, size = dist.group.WORLD, ctx.size
    part, whole = torch.ones(6), torch.ones(6 * size)
    parts = [torch.ones(6) for _ in range(size)]

    def options(kind: Any) -> Any:
        made = kind()
        made.asyncOp = False
        return made

    gather = options(c10d.AllgatherOptions)
    scatter = options(c10d.ReduceScatterOptions)
    reduce = options(c10d.AllreduceOptions)
    coalesced = options(c10d.AllreduceCoalescedOptions)
    return [
        ("all_gather", group.allgather([parts], [part], gather)),
        ("all_gather", group._allgather_base(whole, part, gather)),
        ("all_gather", group.allgather_into_tensor_coalesced([whole], [part], gather)),
        ("reduce_scatter", group.reduce_scatter([part], [parts], scatter)),
        ("reduce_scatter", group._reduce_scatter_base(part, whole, scatter)),
        ("reduce_scatter", group.reduce_scatter_tensor_coalesced([part], [whole], scatter)),
        ("all_reduce", group.allreduce([part], reduce)),
        ("all_reduce", group.allreduce_coalesced([part], coalesced)),
        ("barrier", group.barrier(opts=options(c10d.BarrierOptions))),
    ]


@on(*LAYOUTS)
def synchronous_calls_need_no_work(ctx: Context) -> None:
    for name, work in calls_without_work(ctx):
        assert work is None, name
    from torch.distributed._functional_collectives import (
        allow_inflight_collective_as_graph_input_ctx,
    )
    from torch.distributed.tensor.debug import CommDebugMode

    # Under a mode the call goes through Python, where None must be accepted as a Work too.
    with CommDebugMode() as counted:
        t = torch.ones(3)
        dist.all_reduce(t)
        dist.barrier()
    assert t[0] == ctx.size and counted.get_total_counts() >= 1
    with allow_inflight_collective_as_graph_input_ctx():
        t = torch.ones(3)
        dist.all_reduce(t)
        assert torch.ops._c10d_functional.wait_tensor(t)[0] == ctx.size


def others_run(ctx: Context) -> dict[str, int]:
    """Counts how often another thread of rank 0 runs during a synchronous call of 0.2 s."""
    size, counts = ctx.size, {}
    part, whole = torch.ones(6), torch.ones(6 * size)
    parts = [torch.ones(6) for _ in range(size)]
    calls = {
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(part),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([part]),
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        turns, over = [0], threading.Event()

        def count(turns: list[int] = turns, over: threading.Event = over) -> None:
            while not over.wait(0.005):
                turns[0] += 1

        if ctx.rank > 0:
            time.sleep(0.2)
        counter = threading.Thread(target=count)
        counter.start()
        call()
        counts[name] = turns[0]
        over.set()
        counter.join()
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_threads_run_during_a_synchronous_call(worlds: Pool, layout: str) -> None:
    counts = worlds(layout).run(others_run)[0]
    assert min(counts.values()) >= 3, counts


def waited_for(ctx: Context) -> list[dict[str, Any]]:
    import deepspeed_smddp

    dist.barrier()
    deepspeed_smddp.reset_statistics()
    for asynchronous in (False, True):
        if ctx.rank > 0:
            time.sleep(0.3)
        work = dist.all_reduce(torch.ones(64), async_op=asynchronous)
        if work is not None:
            work.wait()
    return [dict(row) for row in deepspeed_smddp.statistics()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_include_the_wait(worlds: Pool, layout: str) -> None:
    for rank, rows in enumerate(worlds(layout).run(waited_for)):
        (row,) = rows
        assert row["collective"] == "all_reduce" and row["calls"] == 2 and row["rounds"] == 2
        assert row["bytes"] == 2 * 64 * 4 and row["largest_round"] == 64 * 4
        # Rank 0 waits for the others in the synchronous call and in wait().
        if rank == 0:
            assert row["seconds"] >= row["wait_seconds"] > 0.5, row


@on(*LAYOUTS)
def waits_from_other_threads(ctx: Context) -> None:
    started = [cases.start_all_gather(ctx, 5000, seed) for seed in range(8)]
    threads = [threading.Thread(target=work.wait) for work, _, _ in reversed(started)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for _, out, wanted in started:
        assert torch.equal(out, wanted)


@on(*LAYOUTS)
def many_threads_wait_for_one_operation(ctx: Context) -> None:
    time.sleep(0.1 * ctx.rank)
    work, out, wanted = cases.start_all_gather(ctx, 50_000)
    right: list[bool] = []
    threads = [
        threading.Thread(target=lambda: (work.wait(), right.append(torch.equal(out, wanted))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 4


@on(*LAYOUTS, "ABC", "AAAA")
def two_hundred_in_flight(ctx: Context) -> None:
    """As ZeRO-3 gathers the persistent parameters after each step; waited for both ways."""
    for forwards in (True, False):
        started = [cases.start_all_gather(ctx, 1 + 13 * i % 700, i) for i in range(200)]
        for work, out, wanted in started if forwards else reversed(started):
            work.wait()
            assert torch.equal(out, wanted)


@on(*LAYOUTS)
def buffers_and_works_may_be_dropped(ctx: Context) -> None:
    """The operation, not the caller, keeps its inputs and outputs alive."""
    total = torch.zeros(1)
    for i in range(50):
        source = torch.full((20_000,), float(ctx.rank + i))
        work = dist.all_gather_into_tensor(
            torch.empty(20_000 * ctx.size), source * 1, async_op=True
        )
        if i % 3:
            work.wait()
        del work, source
        gc.collect(0)
        torch.full((20_000,), float("nan"))  # reuses freed memory
    t = torch.full((20_000,), 1.0)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((20_000,), float(ctx.size))) and total == 0


def short_wait(ctx: Context) -> str:
    if ctx.rank == 1:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(4))
        return "late"
    work = dist.all_reduce(torch.ones(4), async_op=True)
    began = time.monotonic()
    try:
        work.wait(timedelta(milliseconds=300))
    except RuntimeError as error:
        assert time.monotonic() - began < 1.2, "raised too late"
        return str(error)
    return "no error"


@pytest.mark.alone
def test_wait_with_a_shorter_time_limit() -> None:
    with at_once(((layout, layout) for layout in ("AA", "AB")), {}) as worlds:
        for world in worlds.values():
            world.submit(short_wait)
        for world in worlds.values():
            message, late = world.collect()
            assert late == "late"
            assert message != "no error"
            assert "all_reduce" in message and "time" in message


def late_peer(ctx: Context) -> float:
    """CPU seconds that a rank uses while it waits two seconds for another rank."""
    dist.barrier()
    if ctx.rank == ctx.size - 1:
        time.sleep(2)
    before = time.process_time()
    dist.all_reduce(torch.ones(4))
    return time.process_time() - before


def idle(_: Context) -> float:
    before = time.process_time()
    time.sleep(1.5)
    return time.process_time() - before


@pytest.mark.alone
def test_waiting_and_idle_ranks_use_little_processor_time() -> None:
    with at_once(((layout, layout) for layout in LAYOUTS), {}) as worlds:
        for used, limit in ((late_peer, 0.6), (idle, 0.15)):
            for world in worlds.values():
                world.submit(used)
            for world in worlds.values():
                assert max(world.collect()) < limit


@on("AAB")
def sequence_numbers_count_operations(ctx: Context) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert backend._get_sequence_number_for_group() == before + 3


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)
