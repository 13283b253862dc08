"""Every collective gives the exact result, in every form, type, operation, size and place.

A test is one collective on one layout of hosts and ranks, in one kind of memory or with one setting
(``KINDS``). Each call is compared with the model of ``harness.model`` to the bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from harness import cases, host_device, model
from harness.cases import ALIKE, HOST_FORMS, MANY, MOVES, Case
from harness.host_device import BY_NIC, ENVIRONMENT, ON_CPU, paths
from harness.variables import debug
from harness.worker import Context
from harness.world import Pool, World, WorldError

# Letters are hosts: 1 host, 2 x 1, 2 x 2, 3 x 1, unequal hosts, alternating ranks, 9 hosts.
LAYOUTS = ("A", "AA", "AAAA", "AB", "AABB", "ABC", "AAB", "ABBB", "ABAB", "AAABBCC", "ABCDEFGHI")
FEW = ("AA", "AABB", "ABBB")
SIZES = (  # bytes of one shard: around the thresholds between the paths
    1, 2, 31, 64, 4095, 4096, 32 * 1024 - 2, 32 * 1024, 32 * 1024 + 2,
    128 * 1024 - 2, 128 * 1024 + 6, 1024 * 1024, 1024 * 1024 + 34, 5 * 1024 * 1024 + 10,
)  # fmt: skip
# With messages instead of writes, a NIC can't reach a device's memory.
WRITES = os.environ.get("SMDDP_FABRIC_PROVIDER", "") not in ("udp", "udp;ofi_rxd")

Cases = list[Case]


# ---- what is called


def forms(collective: str) -> Cases:
    """In every form, at once and later, of several tensors where the form takes them."""
    return [
        Case(
            collective,
            form,
            torch.bfloat16,
            (1000, 0, 1, 9457) if form in MANY else (9457,),
            asynchronous=asynchronous,
            seed=7,
        )
        for form in HOST_FORMS[collective]
        for asynchronous in (False, True)
    ]


def lengths(collective: str) -> Cases:
    """Fewer elements than ranks, one more, one less, and a prime number of them."""
    return [
        Case(collective, "base", torch.float16, (numel,), seed=numel)
        for numel in (0, 1, 2, 7, 8, 9, 100_003)
    ]


def places(collective: str) -> Cases:
    """As DeepSpeed does: gather from a slice of the output, reduce into a slice of the input."""
    options = {"all_gather": ("in_place",), "reduce_scatter": ("in_place", "other_slot")}
    return [
        Case(collective, form, torch.bfloat16, (numel,), place=place, seed=17)
        for place in options.get(collective, ())
        for form in ("base", "list", "manager")
        if (form, place) != ("list", "other_slot")
        for numel in (1, 9457, 300_000)
    ]


def types(collective: str) -> Cases:
    """Every type that the collective takes, with every operation."""
    if collective in MOVES:
        form = "unequal" if collective == "all_to_all" else "base"
        return [Case(collective, form, dtype, (333,), seed=11) for dtype in model.MOVABLE]
    return [
        Case(collective, "base", dtype, (2500,), operation, seed=13)
        for operation in model.OPERATIONS
        for dtype in model.REDUCIBLE
        if operation != "AVG" or dtype in model.FLOATING
    ]


def sizes(collective: str) -> Cases:
    """Around the thresholds between the ways by which bytes move."""
    kinds = ((torch.uint8 if size % 2 else torch.bfloat16, size) for size in SIZES)
    return [Case(collective, "base", t, (size // t.itemsize,), seed=size) for t, size in kinds]


def offsets(collective: str) -> Cases:
    """At every address that torch can make, even unaligned to the elements."""
    distances = {torch.uint8: (1, 7), torch.bfloat16: (1, 2, 6), torch.float32: (1, 4)}
    return [
        Case(collective, "base", dtype, (numel,), offset=offset, seed=19)
        for dtype, several in {**distances, torch.float64: (3,)}.items()
        for offset in several
        for numel in (1, 9457, 70_001)
    ]


def on_device(collective: str) -> Cases:
    """What a device takes: the forms with outputs of the caller's, aligned elements."""
    several = [c for c in forms(collective) if not c.form.startswith("functional")]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        several += host_device.varied(dtype, (0, 1, 2, 7, 65, 300_001))
    several += places(collective)
    return [case for case in several if case.collective == collective]


def in_buckets(collective: str) -> Cases:
    """Some whole, some cut into many parts."""
    several = [f for f in ("base", "list", "manager", "coalesced") if f in HOST_FORMS[collective]]
    return [
        Case(collective, form, dtype, (3, 9457, 0, 40_001) if form in MANY else (50_021,), seed=37)
        for form in several
        for dtype in (torch.bfloat16, torch.float64, torch.uint8)
    ]


def sums(collective: str) -> Cases:
    """Floats, whose sums have an order and a rounding."""
    return [
        Case(collective, "base", dtype, (20_011,), operation, seed=43)
        for dtype in model.FLOATING
        for operation in ("SUM", "AVG", "MAX")
    ]


def few(collective: str) -> Cases:
    """One of each size class."""
    numels = (1, 9457, 400_003)
    return [Case(collective, "base", torch.bfloat16, (numel,), seed=31) for numel in numels]


EVERYWHERE = (forms, lengths, places)
MORE = (*EVERYWHERE, types, sizes, offsets)
OWN = ("all_gather", "reduce_scatter", "all_reduce")
REDUCTIONS = ("reduce_scatter", "all_reduce")


# ---- where: the kind of memory, and settings


@dataclass(frozen=True)
class Kind:
    """Ranks with this environment, on these layouts: what is called, where the buffers lie."""

    layouts: dict[str, tuple[Callable[[str], Cases], ...]]
    env: dict[str, str | None] = field(default_factory=dict)
    collectives: tuple[str, ...] = OWN
    prepare: Callable[[Context], None] | None = None
    # The paths of the collectives in a layout, where every call must take them.
    paths: Callable[[str], dict[str, str]] | None = None


def _all(layouts: tuple[str, ...], *batches: Callable[[str], Cases]) -> dict:
    return dict.fromkeys(layouts, batches)


def emulated(ctx: Context) -> None:
    """Buffers on a device of threads, and the model of what its kernels round."""
    host_device.use_host(ctx)
    if paths(ctx.layout)["reduce_scatter"] == f"{host_device.KERNEL}{host_device.FABRIC}":
        host_device.round_on_every_host(ctx)


BUCKETS: dict[str, str | None] = {
    "SMDDP_ALLGATHER_BUCKET_SIZE": "4096",
    "SMDDP_REDUCE_SCATTER_BUCKET_SIZE": "4096",
}
KINDS = {
    "host": Kind(
        {layout: MORE if layout in FEW else EVERYWHERE for layout in LAYOUTS}
        | _all(("AAABB", "AABBCC", "AABBAABB", "AAAAAAAAA"), lengths),
        collectives=tuple(HOST_FORMS),
    ),
    # The variable keeps its worlds apart from those of other tests.
    "shared": Kind(_all(FEW, forms, sizes), {"BUFFERS": "shared"}, prepare=host_device.use_shared),
    "buckets": Kind(_all(FEW, in_buckets), BUCKETS),
    "segment": Kind(_all(FEW, in_buckets), {**BUCKETS, **debug(single_copy=0)}),
    "fp32-partials": Kind(
        _all(("AABB", "ABBB", "ABC"), sums), {"SMDDP_REDUCE_PRECISION": "fp32"}, REDUCTIONS
    ),
    "coded": Kind(
        _all(("AB", "AABB", "ABC"), forms, sizes), {"SMDDP_CODING": "on"}, tuple(HOST_FORMS)
    ),
    # It reorders datagrams: no result may depend on the order of two messages.
    "udp": Kind(_all(("ABB",), few), {"SMDDP_FABRIC_PROVIDER": "udp;ofi_rxd"}, tuple(HOST_FORMS)),
    "device": Kind(
        _all(("A", "AA", "AAA", "AB", "AABB", "ABAB", "AAB", "ABCDE"), on_device),
        ENVIRONMENT,
        prepare=emulated,
        paths=paths,
    ),
    "device-cpu-sums": Kind(
        _all(("AA", "AB", "AABB"), on_device),
        {**ENVIRONMENT, **ON_CPU},
        prepare=host_device.use_host,
        paths=lambda layout: paths(layout, on_cpu=True),
    ),
    "device-by-nic": Kind(
        _all(("AB", "AABB", "ABC", "AAB"), on_device),
        {**ENVIRONMENT, **BY_NIC},
        ("all_gather",),
        prepare=host_device.use_host,
        paths=lambda layout: paths(layout, by_nic=WRITES),
    ),
}
MATRIX = [
    pytest.param(
        kind,
        layout,
        collective,
        marks=[
            pytest.mark.xdist_group(f"collectives {layout}"),  # whose worlds they share
            *([pytest.mark.quick] if kind == "host" and layout in ("AA", "AABB") else []),
        ],
        id=f"{kind}-{layout}-{collective}",
    )
    for kind, where in KINDS.items()
    for layout in where.layouts
    for collective in where.collectives
]


def world_of(worlds: Pool, kind: Kind, layout: str) -> World:
    world = worlds(layout, env=kind.env)
    if kind.prepare is not None:
        world.run(kind.prepare)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "collective"), MATRIX)
def test_exact_results(worlds: Pool, kind: str, layout: str, collective: str) -> None:
    where = KINDS[kind]
    wanted = [case for batch in where.layouts[layout] for case in batch(collective)]
    try:
        world = world_of(worlds, where, layout)
    except WorldError as error:
        if kind == "udp" and "udp;ofi_rxd" in str(error) and "Traceback" in str(error):
            pytest.skip("this libfabric does not offer udp;ofi_rxd")
        raise
    if where.paths is not None:
        for taken in world.run(host_device.check, wanted, timeout=120):
            assert taken == {f"{collective} {where.paths(layout)[collective]}": len(wanted)}
    else:
        digests = world.run(cases.check_all, wanted, timeout=120)
        if collective in ALIKE:
            differ = [str(c) for c, *d in zip(wanted, *digests, strict=True) if len(set(d)) > 1]
            assert differ == [], "ranks hold different results"


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("host", x) for x in (*FEW, "ABC")]
    + [("udp", "ABB"), ("buckets", "AABB")]
    + [("device", x) for x in ("AAA", "AABB", "ABC")]
    + [("device-cpu-sums", "AAA")],
)
def test_many_in_flight_finished_in_another_order(worlds: Pool, kind: str, layout: str) -> None:
    wanted = [
        Case(collective, numels=(numel,), seed=seed)
        for seed, numel in enumerate((1, 500, 70_000, 400_003))
        for collective in KINDS[kind].collectives
    ]
    with contextlib.suppress(WorldError) if kind == "udp" else contextlib.nullcontext():
        world = world_of(worlds, KINDS[kind], layout)
        world.run(cases.check_in_flight, wanted, list(range(len(wanted)))[::-1])


def in_part(ctx: Context, ranks: list[int], wanted: Cases) -> None:
    group = dist.new_group(ranks)
    if ctx.rank in ranks:
        for case in wanted:
            cases.check(ctx, case, group, ranks)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("ranks", [[2], [1, 2], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("layout", ["AAAA", "AABB", "ABAB", "ABCD"])
def test_groups_of_some_ranks(worlds: Pool, layout: str, ranks: list[int]) -> None:
    wanted = [case for collective in OWN for case in [*forms(collective), *few(collective)]]
    worlds(layout).run(in_part, ranks, wanted)


@pytest.mark.parametrize("layout", ["AA", "AABB"])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_many_tensors_in_one_operation(worlds: Pool, layout: str, collective: str) -> None:
    numels = tuple((i * 37) % 900 for i in range(150))
    batch = [Case(collective, f, numels=numels, seed=23) for f in ("manager", MANY[2])]
    worlds(layout).run(cases.check_all, batch)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce", "reduce"])
def test_average_of_integers_is_refused(worlds: Pool, collective: str) -> None:
    world = worlds("AAB")
    case = Case(collective, "base", torch.int32, (10,), "AVG")
    for failure in world.failures(cases.check, case):
        assert failure.kind in ("RuntimeError", "ValueError"), failure.trace
    world.run(cases.check, Case(collective, "base", torch.int32, (10,), "SUM"))
