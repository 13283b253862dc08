"""AllGather, ReduceScatter, AllReduce and barrier in every API form, against an exact model."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import cases, model
from harness import layout as layouts
from harness.cases import ALIKE, HOST_FORMS, MANY, Case
from harness.layout import hosts
from harness.worker import Context
from harness.world import BACKEND, Pool, World, WorldError

# Letters are hosts: 1 host, 2 x 1, 2 x 2, 3 x 1, unequal hosts, alternating ranks, 9 hosts.
LAYOUTS = ("A", "AA", "AAAA", "AB", "AABB", "ABC", "AAB", "ABBB", "ABAB", "AAABBCC", "ABCDEFGHI")
FEW = ("AAA", "AABB", "ABBB")
SIZES = (  # bytes of one shard: around the thresholds between the paths
    1, 2, 31, 64, 4095, 4096, 32 * 1024 - 2, 32 * 1024, 32 * 1024 + 2,
    128 * 1024 - 2, 128 * 1024 + 6, 1024 * 1024, 1024 * 1024 + 34, 5 * 1024 * 1024 + 10,
)  # fmt: skip

gloo_only_covers = pytest.mark.skipif(
    BACKEND == "gloo", reason="development run on gloo, which does not have this"
)

GLOO_FLOATS = {*model.FLOATING, torch.uint8, torch.int8, torch.int32, torch.int64}


def skip_what_gloo_lacks(*checked: Case) -> None:
    """Only for developing the tests themselves: SMDDP_TEST_BACKEND=gloo."""
    for case in checked if BACKEND == "gloo" else ():
        lacking = (
            case.form == "stack"
            or (case.collective, case.form) == ("all_to_all", "list")
            or case.place == "other_slot"
            or case.dtype not in GLOO_FLOATS | {torch.bool, torch.complex64, torch.complex128}
            or (case.collective != "all_gather" and case.dtype not in GLOO_FLOATS)
        )
        if lacking:
            pytest.skip(f"gloo does not have {case}")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- forms, layouts, types, sizes


# One host, two hosts of two ranks, hosts of one and of three ranks.
QUICK = ("AA", "AABB", "ABBB")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=pytest.mark.quick if x in QUICK else ()) for x in LAYOUTS],
)
@pytest.mark.parametrize(
    ("collective", "form"), [(c, form) for c, forms in HOST_FORMS.items() for form in forms]
)
def test_every_form_on_every_layout(worlds: Pool, layout: str, collective: str, form: str) -> None:
    numels = (1000, 0, 1, 9457) if form in MANY else (9457,)
    for asynchronous in (False, True):
        case = Case(collective, form, torch.bfloat16, numels, asynchronous=asynchronous, seed=7)
        skip_what_gloo_lacks(case)
        worlds(layout).run(cases.check, case)


@pytest.mark.parametrize("dtype", model.MOVABLE, ids=name)
@pytest.mark.parametrize(
    ("collective", "form"),
    [
        ("all_gather", "base"),
        ("all_gather", "list"),
        ("all_gather", "manager"),
        ("broadcast", "base"),
        ("all_to_all", "unequal"),
        ("gather", "base"),
        ("scatter", "base"),
    ],
)
def test_every_type_is_moved(worlds: Pool, collective: str, form: str, dtype: torch.dtype) -> None:
    for layout in FEW:
        case = Case(collective, form, dtype, (333,), seed=11)
        skip_what_gloo_lacks(case)
        worlds(layout).run(cases.check, case)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        pytest.param(operation, dtype, id=f"{operation}-{name(dtype)}")
        for operation in model.OPERATIONS
        for dtype in model.REDUCIBLE
        if operation != "AVG" or dtype in model.FLOATING
    ],
)
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce", "reduce"])
def test_reductions_of_every_type(
    worlds: Pool, collective: str, operation: str, dtype: torch.dtype
) -> None:
    for layout in FEW:
        case = Case(collective, "base", dtype, (2500,), operation, seed=13)
        skip_what_gloo_lacks(case)
        digests = worlds(layout).run(cases.check, case)
        if collective == "all_reduce":
            assert len(set(digests)) == 1, "ranks hold different results"


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce", "reduce"])
def test_average_of_integers_is_refused(worlds: Pool, collective: str) -> None:
    world = worlds("AAB")
    case = Case(collective, "base", torch.int32, (10,), "AVG")
    for failure in world.failures(cases.check, case):
        assert failure.kind in ("RuntimeError", "ValueError"), failure.trace
    world.run(cases.check, Case(collective, "base", torch.int32, (10,), "SUM"))


@pytest.mark.parametrize("layout", ["AA", "AB", "AABB"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", list(HOST_FORMS))
def test_sizes_around_the_thresholds(worlds: Pool, layout: str, collective: str, size: int) -> None:
    dtype = torch.uint8 if size % 2 else torch.bfloat16
    case = Case(collective, "base", dtype, (size // dtype.itemsize,), seed=size)
    digests = worlds(layout).run(cases.check, case)
    if collective in ALIKE:
        assert len(set(digests)) == 1


@pytest.mark.parametrize("layout", [*LAYOUTS, "AAABB", "AABBCC", "AABBAABB", "AAAAAAAAA"])
@pytest.mark.parametrize("collective", list(HOST_FORMS))
def test_world_sizes_and_uneven_lengths(worlds: Pool, layout: str, collective: str) -> None:
    """Fewer elements than ranks, one more, one less, and a prime number of them."""
    batch = [
        Case(collective, "base", torch.float16, (numel,), seed=numel)
        for numel in (0, 1, 2, 7, 8, 9, 100_003)
    ]
    worlds(layout).run(cases.check_all, batch)


# ---- placement


@pytest.mark.parametrize("layout", ["A", "AA", "AB", "AABB", "ABBB", "ABAB", "AAABBCC"])
@pytest.mark.parametrize(
    ("collective", "form", "place"),
    [
        ("all_gather", "base", "in_place"),
        ("all_gather", "list", "in_place"),
        ("all_gather", "manager", "in_place"),
        ("reduce_scatter", "base", "in_place"),
        ("reduce_scatter", "base", "other_slot"),
        ("reduce_scatter", "list", "in_place"),
        ("reduce_scatter", "manager", "in_place"),
        ("reduce_scatter", "manager", "other_slot"),
    ],
)
def test_in_place(worlds: Pool, layout: str, collective: str, form: str, place: str) -> None:
    """As DeepSpeed does: gather from a slice of the output, reduce into a slice of the input."""
    batch = [
        Case(collective, form, torch.bfloat16, (numel,), place=place, seed=17)
        for numel in (1, 9457, 300_000)
    ]
    skip_what_gloo_lacks(*batch)
    worlds(layout).run(cases.check_all, batch)


@pytest.mark.parametrize("layout", ["AA", "AB", "AABB"])
@pytest.mark.parametrize("collective", list(HOST_FORMS))
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (torch.uint8, 1),
        (torch.uint8, 7),
        (torch.bfloat16, 2),
        (torch.bfloat16, 6),
        (torch.float32, 4),
        (torch.bfloat16, 1),
        (torch.float32, 1),
        (torch.float64, 3),
    ],
)
def test_odd_byte_offsets(
    worlds: Pool, layout: str, collective: str, dtype: torch.dtype, offset: int
) -> None:
    """Tensors at every address that torch can make work, even unaligned to their elements."""
    batch = [
        Case(collective, "base", dtype, (numel,), offset=offset, seed=19)
        for numel in (1, 9457, 70_001)
    ]
    worlds(layout).run(cases.check_all, batch)


@pytest.mark.parametrize("layout", ["AA", "AABB"])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("form", ["manager", "functional_coalesced"])
def test_many_tensors_in_one_operation(
    worlds: Pool, layout: str, collective: str, form: str
) -> None:
    numels = tuple((i * 37) % 900 for i in range(150))
    case = Case(collective, form, torch.float32, numels, seed=23)
    skip_what_gloo_lacks(case)
    worlds(layout).run(cases.check, case)


def mixed_types(ctx: Context) -> None:
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


@gloo_only_covers
@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_coalesced_all_gather_of_mixed_types(worlds: Pool, layout: str) -> None:
    worlds(layout).run(mixed_types)


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
        assert "contiguous" in str(error) or "dense" in str(error) or ctx.backend == "gloo", error
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


def sliced_rows(ctx: Context) -> None:
    """Every other row as list outputs, a column block as input."""
    big = torch.zeros(ctx.size * 2, 8)
    source = model.data(5, ctx.rank, torch.float32, 32).view(2, 16)[0, ::2]
    dist.all_gather([big[2 * r] for r in range(ctx.size)], source.contiguous())
    for rank in range(ctx.size):
        row = model.data(5, rank, torch.float32, 32).view(2, 16)[0, ::2]
        assert torch.equal(big[2 * rank], row)
        assert not big[2 * rank + 1].any()


def test_rows_of_a_matrix_as_outputs(worlds: Pool) -> None:
    worlds("AAB").run(sliced_rows)


# ---- an output that lies in the input


def overlapping(ctx: Context) -> None:
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


@pytest.mark.parametrize("layout", ["AA", "AABB", "ABBB"])
def test_exchanges_whose_output_lies_in_the_input(worlds: Pool, layout: str) -> None:
    worlds(layout).run(overlapping)


# ---- functional collectives beyond dimension 0, and their gradients


def functional_dimensions(ctx: Context) -> None:
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


@pytest.mark.parametrize("layout", ["AA", "AABB", "ABC"])
def test_functional_collectives_along_other_dimensions(worlds: Pool, layout: str) -> None:
    worlds(layout).run(functional_dimensions)


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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_leaves_a_barrier_before_all_have_entered(
    worlds: Pool, layout: str, form: str
) -> None:
    for late in {0, len(layout) - 1, len(layout) // 2}:
        times = worlds(layout).run(timed_barrier, form, late)
        assert min(after for _, after in times) >= max(before for before, _ in times)


def barriers_in_a_row(ctx: Context) -> None:
    for _ in range(200):
        dist.barrier()


@pytest.mark.parametrize("layout", ["AAAA", "AABB", "ABC"])
def test_many_barriers(worlds: Pool, layout: str) -> None:
    worlds(layout).run(barriers_in_a_row)


# ---- other settings, and another provider between hosts


@gloo_only_covers
@pytest.mark.parametrize("single_copy", ["1", "0"], ids=["single copy", "through the segment"])
@pytest.mark.parametrize("layout", ["AAA", "AABB", "ABBB"])
def test_cut_into_many_buckets(worlds: Pool, layout: str, single_copy: str) -> None:
    env = {
        "SMDDP_ALLGATHER_BUCKET_SIZE": "4096",
        "SMDDP_REDUCE_SCATTER_BUCKET_SIZE": "4096",
        "SMDDP_SINGLE_COPY": single_copy,
    }
    world = worlds(layout, env=env)
    for collective, form in (
        ("all_gather", "base"),
        ("all_gather", "list"),
        ("all_gather", "manager"),
        ("reduce_scatter", "base"),
        ("reduce_scatter", "manager"),
        ("all_reduce", "base"),
        ("all_reduce", "coalesced"),
    ):
        for dtype in (torch.bfloat16, torch.float64, torch.uint8):
            numels = (3, 9457, 0, 40_001) if form in MANY else (50_021,)
            cases_ = [Case(collective, form, dtype, numels, seed=seed) for seed in (37, 41)]
            world.run(cases.check_in_flight, cases_, [1, 0])


@gloo_only_covers
@pytest.mark.parametrize("layout", ["AABB", "ABBB", "ABC"])
def test_partial_sums_in_fp32(worlds: Pool, layout: str) -> None:
    world = worlds(layout, env={"SMDDP_REDUCE_PRECISION": "fp32"})
    for collective in ("reduce_scatter", "all_reduce"):
        for dtype in model.FLOATING:
            for operation in ("SUM", "AVG", "MAX"):
                case = Case(collective, "base", dtype, (20_011,), operation, seed=43)
                world.run(cases.check, case)


@gloo_only_covers
def test_a_provider_that_delivers_in_any_order() -> None:
    """udp;ofi_rxd reorders datagrams: no result may depend on the order of two messages."""
    env = {"SMDDP_FABRIC_PROVIDER": "udp;ofi_rxd"}
    world = World("ABB", env=env)
    try:
        world.join()
    except WorldError as error:
        message = str(error)
        if "udp;ofi_rxd" in message and "Traceback" in message:
            pytest.skip(f"this libfabric does not offer udp;ofi_rxd: {message.splitlines()[-1]}")
        raise
    with contextlib.closing(world):
        for collective in HOST_FORMS:
            batch = [
                Case(collective, "base", torch.bfloat16, (numel,), seed=31)
                for numel in (1, 9457, 400_003)
            ]
            world.run(cases.check_all, batch)
            world.run(cases.check_in_flight, batch * 3, list(range(8, -1, -1)))


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


def test_layout_helpers() -> None:
    assert hosts("ABAB") == [[0, 2], [1, 3]]
    assert layouts.local_rank("ABAB", 3) == 1
    assert layouts.restrict("AABB", [3, 0]) == "BA"


def objects(ctx: Context) -> None:
    cases.check(ctx, Case("all_gather", "base", torch.uint8, (77,)))
    gathered: list[Any] = [None] * ctx.size
    dist.all_gather_object(gathered, {"rank": ctx.rank, "text": "x" * ctx.rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(ctx.size)]


def test_objects_of_unequal_length_are_gathered(worlds: Pool) -> None:
    worlds("AAB").run(objects)
