"""The futures of operations: requested at any time, chained, with callbacks, failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import model
from harness.cases import start_all_gather
from harness.on_layouts import Body, OnLayouts
from harness.worker import Context
from harness.world import Pool, fresh

LAYOUTS = ("AA", "AB", "AABB")
on = OnLayouts()


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in leaves(part)]


@on(*LAYOUTS)
def futures(ctx: Context) -> None:
    work, out, wanted = start_all_gather(ctx)
    seen: list[int] = []

    def sum_of(future: torch.futures.Future) -> torch.Tensor:
        seen.append(threading.get_ident())
        return torch.cat([t.reshape(-1) for t in leaves(future.value())]).sum()

    chained = work.get_future().then(sum_of).then(lambda f: f.value() * 2)
    got = chained.wait()
    assert len(seen) == 1
    assert torch.equal(out, wanted)
    assert torch.allclose(got, wanted.sum() * 2)
    late = work.get_future()
    assert late.done()
    assert late.then(lambda f: 7).wait() == 7

    t = torch.full((10,), float(ctx.rank + 1))
    done = threading.Event()
    dist.all_reduce(t, async_op=True).get_future().add_done_callback(lambda f: done.set())
    assert done.wait(20)
    assert t[0] == ctx.size * (ctx.size + 1) / 2


@on(*LAYOUTS)
def a_future_may_be_requested_at_any_time(ctx: Context) -> None:
    """Requested before, after and during the completion; all requests share one result."""
    early, _, _ = start_all_gather(ctx, seed=1)
    future = early.get_future()
    early.wait()
    wanted = torch.cat([model.data(1, rank, torch.float32, 1000) for rank in range(ctx.size)])
    assert torch.equal(torch.cat([t.reshape(-1) for t in leaves(future.wait())]), wanted)

    late, _, wanted = start_all_gather(ctx, seed=2)
    late.wait()
    first, second = late.get_future(), late.get_future()
    assert first.done() and second.done()
    for future in (first, second):
        assert torch.equal(torch.cat([t.reshape(-1) for t in leaves(future.value())]), wanted)

    for seed in range(20):
        work, _, wanted = start_all_gather(ctx, 50, seed)
        seen: list[Any] = []
        threads = [
            threading.Thread(target=lambda w=work, s=seen: s.append(w.get_future().wait()))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        if seed % 2:
            work.wait()
        for thread in threads:
            thread.join(20)
        assert len(seen) == 3
        for value in seen:
            assert torch.equal(torch.cat([t.reshape(-1) for t in leaves(value)]), wanted)
    barrier = dist.barrier(async_op=True)
    assert barrier.get_future().wait() == []


@on(*LAYOUTS)
def a_callback_may_start_the_next_operation(ctx: Context) -> None:
    """A callback may start the next collective, as DDP's communication hooks do."""
    first, second = torch.ones(100), torch.ones(100)
    works: list[Any] = []
    done = threading.Event()

    def follow(_: torch.futures.Future) -> None:
        works.append(dist.all_reduce(second, async_op=True))
        done.set()

    work = dist.all_reduce(first, async_op=True)
    work.get_future().add_done_callback(follow)
    work.wait()
    assert done.wait(20)
    works[0].wait()
    assert first[0] == ctx.size and second[0] == ctx.size


@on(*LAYOUTS)
def callbacks_may_wait(ctx: Context) -> None:
    """For operations and futures, one inside another; and for one that is in flight already."""
    sums: list[float] = []
    done = threading.Event()
    in_flight = dist.all_reduce(torch.ones(100_000), async_op=True)

    def level(depth: int) -> None:
        t = torch.full((10,), float(depth))
        work = dist.all_reduce(t, async_op=True)
        if depth == 0:
            work.wait()
            in_flight.get_future().wait()
            done.set()
        else:
            work.get_future().then(lambda f: level(depth - 1)).wait()
        sums.append(t[0].item() / ctx.size)

    work = dist.all_reduce(torch.ones(10), async_op=True)
    future = work.get_future().then(lambda f: level(3))
    assert done.wait(20)
    future.wait()
    assert sums == [0, 1, 2, 3]


@on("AA", "AB")
def a_callback_that_raises_fails_what_follows_it_alone(ctx: Context) -> None:
    def fail(_: torch.futures.Future) -> None:
        raise ValueError("out of order")

    for _ in range(3):
        t = torch.ones(10)
        work = dist.all_reduce(t, async_op=True)
        failed = work.get_future().then(fail)
        with pytest.raises(RuntimeError, match="out of order"):
            failed.wait()
        work.wait()
        assert t[0] == ctx.size


@on("AA", "AB")
def a_work_is_complete_in_its_own_callback(ctx: Context) -> None:
    t = torch.ones(10)
    work = dist.all_reduce(t, async_op=True)
    waited = work.get_future().then(lambda f: work.wait() and t[0].item())
    assert waited.wait() == ctx.size


def wait_in_vain(ctx: Context) -> str:
    """In a callback, for an operation that rank 1 does not join; the limit is 2 s."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    seen = []

    def follow(_: torch.futures.Future) -> None:
        if ctx.rank == 0:
            try:
                dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
            except RuntimeError as error:
                seen.append(str(error))

    work.get_future().then(follow).wait()
    return "".join(seen)


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_the_deadline_comes_inside_a_callback(layout: str) -> None:
    with fresh(layout, env={"SMDDP_TIMEOUT_SECONDS": "2"}) as world:
        assert (
            "all_reduce(40 bytes in all, float32, sum) #2 of group '0' timed out after 2 s"
            in (world.run(wait_in_vain)[0])
        )


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)
