"""Calls beyond the matrix of test_collectives.py: views, overlaps, barriers, unusual sums."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import cases, model
from harness.cases import Case
from harness.on_layouts import Body, OnLayouts
from harness.worker import Context
from harness.world import Pool

on = OnLayouts()


@on("AA", "AABB")
def coalesced_all_gather_of_mixed_types(ctx: Context) -> None:
    types = (torch.float32, torch.uint8, torch.bfloat16, torch.int64, torch.bool)
    shards = [
        [model.data(i, rank, dtype, 101 + i) for rank in range(ctx.size)]
        for i, dtype in enumerate(types)
    ]
    outputs = [torch.empty(ctx.size * (101 + i), dtype=t) for i, t in enumerate(types)]
    with dist.distributed_c10d._coalescing_manager():
        for output, parts in zip(outputs, shards, strict=True):
            dist.all_gather_into_tensor(output, parts[ctx.rank])
    for output, parts in zip(outputs, shards, strict=True):
        assert model.same_bits(output, torch.cat(parts))


# ---- views


def strided(ctx: Context, kind: str) -> str:
    """A right result, or a refusal with a reason; the same on every rank."""
    rows, columns = 40, 30
    shards = [model.data(3, r, torch.float32, rows * columns) for r in range(ctx.size)]
    mine = shards[ctx.rank].view(rows, columns)
    transposed = mine.t().contiguous().t()  # the same values, columns first in memory
    assert not transposed.is_contiguous()
    wanted = torch.cat(shards).view(-1, columns)
    summed = model.reduced(shards, ctx.layout, "SUM", 0).view(rows, columns)
    try:
        if kind == "all_gather input":
            out = torch.empty(rows * ctx.size, columns)
            dist.all_gather_into_tensor(out, transposed)
        elif kind == "all_gather output":
            out = torch.empty(columns, rows * ctx.size).t()
            dist.all_gather_into_tensor(out, mine)
        elif kind == "list input":
            outs = [torch.empty(rows, columns) for _ in range(ctx.size)]
            dist.all_gather(outs, transposed)
            out = torch.cat(outs)
        elif kind == "list outputs":
            outs = [torch.empty(columns, rows).t() for _ in range(ctx.size)]
            dist.all_gather(outs, mine)
            out = torch.cat(outs)
        elif kind == "all_reduce":
            out, wanted = transposed, summed
            dist.all_reduce(out)
        elif kind == "broadcast":
            out, wanted = transposed, shards[1].view(rows, columns)
            dist.broadcast(out, src=1)
        elif kind == "reduce":
            out, wanted = transposed, summed if ctx.rank == 1 else mine.clone()
            dist.reduce(out, dst=1)
        elif kind == "all_to_all":
            source = torch.cat([mine + r for r in range(ctx.size)])
            source = source.t().contiguous().t()
            out = torch.empty(columns, rows * ctx.size).t()
            wanted = wanted + ctx.rank
            dist.all_to_all_single(out, source)
        elif kind == "gather":
            outs = [torch.empty(columns, rows).t() for _ in range(ctx.size)]
            dist.gather(transposed, outs if ctx.rank == 1 else None, dst=1)
            out = torch.cat(outs) if ctx.rank == 1 else wanted
        elif kind == "scatter":
            out = torch.empty(columns, rows).t()
            parts = [(mine + r).t().contiguous().t() for r in range(ctx.size)]
            dist.scatter(out, parts if ctx.rank == 1 else None, src=1)
            wanted = shards[1].view(rows, columns) + ctx.rank
        elif kind == "reduce_scatter input":
            whole = torch.stack([mine] * ctx.size)
            source = whole.transpose(1, 2).contiguous().transpose(1, 2)
            out, wanted = torch.empty(rows, columns), summed
            dist.reduce_scatter_tensor(out, source)
        else:
            whole = torch.stack([mine] * ctx.size)
            out, wanted = torch.empty(columns, rows).t(), summed
            dist.reduce_scatter_tensor(out, whole)
    except (ValueError, RuntimeError) as error:
        assert "contiguous" in str(error) or "dense" in str(error), error
        return "refused"
    assert torch.allclose(out, wanted), f"{kind}: wrong values"
    return "right"


@pytest.mark.parametrize("layout", ["AA", "AABB"])
@pytest.mark.parametrize(
    "kind",
    [
        "all_gather input",
        "all_gather output",
        "list input",
        "list outputs",
        "all_reduce",
        "broadcast",
        "reduce",
        "all_to_all",
        "gather",
        "scatter",
        "reduce_scatter input",
        "reduce_scatter output",
    ],
)
def test_views_that_are_not_contiguous(worlds: Pool, layout: str, kind: str) -> None:
    outcomes = set(worlds(layout).run(strided, kind))
    assert len(outcomes) == 1
    print(kind, outcomes)


@on("AAB")
def rows_of_a_matrix_as_outputs(ctx: Context) -> None:
    """Every other row as list outputs, a column block as input."""
    big = torch.zeros(ctx.size * 2, 8)
    source = model.data(5, ctx.rank, torch.float32, 32).view(2, 16)[0, ::2]
    dist.all_gather([big[2 * r] for r in range(ctx.size)], source.contiguous())
    for rank in range(ctx.size):
        row = model.data(5, rank, torch.float32, 32).view(2, 16)[0, ::2]
        assert torch.equal(big[2 * rank], row)
        assert not big[2 * rank + 1].any()


# ---- an output that lies in the input


@on("AA", "AABB", "ABBB")
def exchanges_whose_output_lies_in_the_input(ctx: Context) -> None:
    size, rank = ctx.size, ctx.rank
    blocks = [torch.full((5000,), 10.0 * source + rank) for source in range(size)]
    both = torch.cat([torch.full((5000,), 10.0 * rank + target) for target in range(size)])
    dist.all_to_all_single(both, both)
    assert torch.equal(both, torch.cat(blocks))
    longer = torch.cat([torch.full((5000,), 10.0 * rank + t) for t in range(size)] + [blocks[0]])
    dist.all_to_all_single(longer[5000:], longer[:-5000])  # one block further on
    assert torch.equal(longer[5000:], torch.cat(blocks))
    rows = torch.empty(size, 5000)
    for own in (rank, (rank + 1) % size):  # the root's part in its place, and in another one
        rows[own] = float(rank)
        dist.gather(rows[own], list(rows) if rank == 1 else None, dst=1)
        if rank == 1:
            assert torch.equal(
                rows, torch.arange(float(size)).repeat_interleave(5000).view_as(rows)
            )
        rows = rows + 0.5 if rank == 1 else torch.full((size, 5000), -1.0)
        dist.scatter(rows[own], list(rows) if rank == 1 else None, src=1)
        assert bool((rows[own] == rank + 0.5).all())


# ---- functional collectives beyond dimension 0, and their gradients


@on("AA", "AABB", "ABC")
def functional_collectives_along_other_dimensions(ctx: Context) -> None:
    mine = torch.arange(12.0).view(3, 4) + 100 * ctx.rank
    parts = [torch.arange(12.0).view(3, 4) + 100 * r for r in range(ctx.size)]
    out = functional.all_gather_tensor(mine, 1, dist.group.WORLD)
    assert torch.equal(functional.wait_tensor(out), torch.cat(parts, dim=1))
    wide = torch.cat([mine] * ctx.size, dim=1)
    out = functional.wait_tensor(functional.reduce_scatter_tensor(wide, "sum", 1, dist.group.WORLD))
    assert torch.equal(out, torch.stack(parts).sum(0))
    lazy = functional.all_reduce(mine, "max", dist.group.WORLD)
    assert torch.equal(lazy + 0, parts[-1])  # an AsyncCollectiveTensor waits at its first use
    assert torch.equal(mine, parts[ctx.rank]), "the input was changed"


# ---- barrier


def timed_barrier(ctx: Context, form: str, late: int) -> tuple[float, float]:
    time.sleep(0.15 if ctx.rank == late else 0.0)
    before = time.monotonic()
    if form == "async":
        dist.barrier(async_op=True).wait()
    elif form == "device_ids":
        dist.barrier(device_ids=[0])
    else:
        dist.barrier()
    return before, time.monotonic()


@pytest.mark.parametrize("form", ["plain", "async", "device_ids"])
@pytest.mark.parametrize("layout", ["A", "AAAA", "AABB", "ABC", "AAABBCC"])
def test_no_rank_leaves_a_barrier_before_all_have_entered(
    worlds: Pool, layout: str, form: str
) -> None:
    for late in {0, len(layout) - 1, len(layout) // 2}:
        times = worlds(layout).run(timed_barrier, form, late)
        assert min(after for _, after in times) >= max(before for before, _ in times)


@on("AAAA", "AABB", "ABC")
def many_barriers(ctx: Context) -> None:
    for _ in range(200):
        dist.barrier()


# ---- bad calls are refused before anything is sent


def bad_call(ctx: Context, kind: str) -> str:
    n = ctx.size
    x = torch.zeros(10)
    try:
        if kind == "all_gather output too small":
            dist.all_gather_into_tensor(torch.zeros(10 * n - 1), x)
        elif kind == "all_gather output too large":
            dist.all_gather_into_tensor(torch.zeros(10 * n + n), x)
        elif kind == "all_gather types differ":
            dist.all_gather_into_tensor(torch.zeros(10 * n, dtype=torch.float64), x)
        elif kind == "list too short":
            dist.all_gather([torch.zeros(10)] * (n - 1), x)
        elif kind == "list of other sizes":
            dist.all_gather([torch.zeros(10 + r) for r in range(n)], x)
        elif kind == "reduce_scatter input too small":
            dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(10 * n - 1))
        elif kind == "reduce_scatter types differ":
            dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(10 * n, dtype=torch.int32))
        elif kind == "reduce_scatter list too long":
            dist.reduce_scatter(torch.zeros(10), [torch.zeros(10)] * (n + 1))
        else:
            dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,)))
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    raise AssertionError(f"{kind} was accepted")


@pytest.mark.parametrize("layout", ["AA", "AAB"])
@pytest.mark.parametrize(
    "kind",
    [
        "all_gather output too small",
        "all_gather output too large",
        "all_gather types differ",
        "list too short",
        "list of other sizes",
        "reduce_scatter input too small",
        "reduce_scatter types differ",
        "reduce_scatter list too long",
    ],
)
def test_bad_calls_are_refused_at_once(worlds: Pool, layout: str, kind: str) -> None:
    world = worlds(layout)
    for message in world.run(bad_call, kind):
        assert len(message) > 20, message
    world.run(cases.check, Case("all_reduce", seed=29))  # and the group still works


# ---- sums bit by bit: special values, and the reductions of the fallback


@on("AAA", "AABB")
def infinity_and_nan(ctx: Context) -> None:
    """Infinity stays, opposite infinities and NaN give NaN, fp16 overflows only in the result."""
    inf, nan = float("inf"), float("nan")
    for dtype in model.FLOATING:
        t = torch.tensor([inf, inf if ctx.rank == 0 else -inf, 1.0, 0.0, -0.0], dtype=dtype)
        if ctx.rank == ctx.size - 1:
            t[2] = nan
        dist.all_reduce(t)
        assert t[0] == inf and t[1].isnan() and t[2].isnan() and t[3] == 0, (dtype, t)
        for operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            t = torch.tensor([inf, -inf, float(ctx.rank)], dtype=dtype)
            dist.all_reduce(t, op=operation)
            last = 0.0 if operation == dist.ReduceOp.MIN else ctx.size - 1.0
            assert t.tolist() == [inf, -inf, last], (dtype, t)


@on("AAB")
def complex_all_reduce(ctx: Context) -> None:
    t = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (ctx.rank + 1)
    dist.all_reduce(t)
    factor = ctx.size * (ctx.size + 1) / 2
    assert torch.equal(t, torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * factor)


@on("AAB")
def bool_all_reduce(ctx: Context) -> None:
    for operation, wanted in ((dist.ReduceOp.MAX, True), (dist.ReduceOp.MIN, False)):
        t = torch.tensor([ctx.rank == 0, True, False])
        dist.all_reduce(t, op=operation)
        assert t.tolist() == [wanted, True, False], (operation, t)


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)
