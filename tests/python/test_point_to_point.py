"""Messages between two ranks on CPUs: values, order, failures."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp

import deepspeed_smddp
from harness import model
from harness.failing import at_once, raised_by
from harness.on_layouts import Body, OnLayouts
from harness.worker import Context, Failure
from harness.world import Pool, fresh, shared_memory_left

on = OnLayouts()
TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
DEADLINE = 3  # seconds, of a message
GRACE = 3.0


def value(source: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank ``source`` sends as its ``number``-th message; no two are alike."""
    bits = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64)
    data = (bits * 31 + source * 7 + number * 13) % (2 if dtype == torch.bool else 251)
    return data.to(torch.uint8).view(dtype).view(shape)


def paths() -> set[tuple[str, str]]:
    return {(row["collective"], row["path"]) for row in deepspeed_smddp.statistics()}


@on("AA", "AB", "AABB")
def what_is_sent_arrives(ctx: Context) -> None:
    deepspeed_smddp.reset_statistics()
    draw = random.Random(5)
    for number in range(40):
        source, target = draw.sample(range(ctx.size), 2)
        shape = tuple(draw.choice((0, 1, 3, 17, 200)) for _ in range(draw.randint(0, 3)))
        dtype, tag = draw.choice(TYPES), draw.choice((0, 0, 1, 77))
        sent = value(source, number, shape, dtype)
        if ctx.rank == source:
            dist.send(sent, target, tag=tag)
        elif ctx.rank == target:
            got = torch.empty(shape, dtype=dtype)
            assert dist.recv(got, source, tag=tag) == source
            assert model.same_bits(got, sent), (number, shape, dtype)
    dist.barrier()
    rows = {row["collective"]: row for row in deepspeed_smddp.statistics()}
    assert not [row for row in rows.values() if row["path"].startswith("fallback")], rows
    assert rows["send"]["calls"] > 0 and rows["recv"]["bytes"] > 0


@on("AA", "AB")
def large_messages(ctx: Context) -> None:
    for numel in (1 << 20, (8 << 20) + 3):
        mine, theirs = (model.data(1, r, torch.float32, numel) for r in (ctx.rank, 1 - ctx.rank))
        got = torch.empty(numel)
        works = [dist.isend(mine, 1 - ctx.rank), dist.irecv(got, 1 - ctx.rank)]
        for work in works:
            assert work is not None
            work.wait()
        assert model.same_bits(got, theirs)


@on("AA", "AB")
def messages_that_nobody_waits_for(ctx: Context) -> None:
    """They move all the same, in a process that calls nothing more; each time after a pause."""
    mine, theirs = (model.data(1, r, torch.float32, 1 << 20) for r in (ctx.rank, 1 - ctx.rank))
    for _ in range(3):
        got = torch.zeros(1 << 20)
        works: list[Any] = [dist.irecv(got, 1 - ctx.rank), dist.isend(mine, 1 - ctx.rank)]
        until = time.monotonic() + 10
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert model.same_bits(got, theirs)
        time.sleep(0.2)


@on("AA", "AB")
def strided_tensors(ctx: Context) -> None:
    whole = model.data(2, 0, torch.float32, 600).view(20, 30)
    views = [whole.t(), whole[:, ::3], whole[3:7, 5], torch.view_as_complex(whole.view(-1, 2)).t()]
    for view in views:
        if ctx.rank == 0:
            dist.send(view, 1)
            continue
        space = torch.zeros((*view.shape, 2), dtype=view.dtype)
        got = space[..., 0]
        dist.recv(got, 0)
        assert torch.equal(got, view.resolve_conj())
        assert not space[..., 1].any()


@on("AA", "AB", "AABB")
def both_directions_at_once(ctx: Context) -> None:
    """Each rank sends to all others before it receives anything."""
    others = [r for r in range(ctx.size) if r != ctx.rank]
    sends = [dist.isend(torch.full((5000,), ctx.rank * 10.0 + r), r) for r in others]
    got = {r: torch.empty(5000) for r in others}
    receives = [dist.irecv(got[r], r) for r in reversed(others)]
    for work in [*sends, *receives]:
        assert work is not None
        work.wait()
        assert work.is_completed() and work.is_success()
    for r in others:
        assert bool((got[r] == r * 10.0 + ctx.rank).all())


@on("AA", "AB")
def order_holds_for_each_tag(ctx: Context) -> None:
    """The k-th send meets the k-th receive of its tag, whatever the order of the tags."""
    numbers = [(tag, k) for k in range(20) for tag in (0, 1, 2)]
    order = sorted(numbers, key=lambda n: (n[1] // 7, n[0] * (1 if ctx.rank else -1), n[1]))
    works: list[Any] = []
    got: dict[tuple[int, int], torch.Tensor] = {}
    for tag, k in order:
        if ctx.rank == 0:
            works.append(dist.isend(torch.tensor([tag * 100 + k]), 1, tag=tag))
        else:
            got[tag, k] = torch.empty(1, dtype=torch.int64)
            works.append(dist.irecv(got[tag, k], 0, tag=tag))
    for work in random.Random(ctx.rank).sample(works, len(works)):
        work.wait()
    for (tag, k), tensor in got.items():
        assert tensor.item() == tag * 100 + k


@on("AA", "AB")
def other_shapes_of_one_size(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.send(torch.arange(12.0), 1)
    else:
        got = torch.empty(3, 4)
        dist.recv(got, 0)
        assert torch.equal(got, torch.arange(12.0).view(3, 4))


@on("AAAA", "AABB", "ABCD")
def batches_in_any_order(ctx: Context) -> None:
    left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
    for turn in range(6):
        sent = [torch.full((300,), ctx.rank + 10.0 * turn + side) for side in (0.25, 0.5)]
        got = [torch.empty(300), torch.empty(300)]
        batch = [
            P2POp(dist.isend, sent[0], left),
            P2POp(dist.isend, sent[1], right),
            P2POp(dist.irecv, got[0], right),
            P2POp(dist.irecv, got[1], left),
        ]
        random.Random(7 * turn + ctx.rank).shuffle(batch)
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert bool((got[0] == right + 10.0 * turn + 0.25).all())
        assert bool((got[1] == left + 10.0 * turn + 0.5).all())


@on("AAAAAAAA", "AABBCCDD")
def a_pipeline_with_many_messages_in_flight(ctx: Context) -> None:
    """Every rank starts all its sends and receives, then waits for them, the last ones first."""
    count, first, last = 32, ctx.rank == 0, ctx.rank == ctx.size - 1
    works: list[Any] = []
    forward = [torch.empty(2000) for _ in range(count)]
    backward = [torch.empty(2000) for _ in range(count)]
    for k in range(count):
        if not last:
            works.append(dist.isend(torch.full((2000,), ctx.rank + k / 64), ctx.rank + 1))
            works.append(dist.irecv(backward[k], ctx.rank + 1))
        if not first:
            works.append(dist.isend(torch.full((2000,), ctx.rank - k / 64), ctx.rank - 1))
            works.append(dist.irecv(forward[k], ctx.rank - 1))
    for work in reversed(works):
        work.wait()
    for k in range(count):
        assert first or bool((forward[k] == ctx.rank - 1 + k / 64).all())
        assert last or bool((backward[k] == ctx.rank + 1 - k / 64).all())


@on("AAAA", "AABB")
def one_forward_one_backward(ctx: Context) -> None:
    """Blocking receives, and sends that are waited for at the end, as a pipeline calls them."""
    stages, micro = ctx.size, 8
    warm = min(stages - 1 - ctx.rank, micro)
    sends: list[Any] = []
    seen: dict[str, list[float]] = {"forward": [], "backward": []}

    def step(name: str, k: int, source: int, target: int, ends: int) -> None:
        x = torch.full((64,), float(k * 100))
        if 0 <= source < stages:
            dist.recv(x, source)
        if 0 <= target < stages:
            sends.append(dist.isend(x + 1, target))
        seen[name].append(x[0].item())
        assert x[0] == k * 100 + ends, (name, k)

    def forward(k: int) -> None:
        step("forward", k, ctx.rank - 1, ctx.rank + 1, ctx.rank)

    def backward(k: int) -> None:
        step("backward", k, ctx.rank + 1, ctx.rank - 1, stages - 1 - ctx.rank)

    for k in range(micro + warm):
        if k < micro:
            forward(k)
        if k >= warm:
            backward(k - warm)
    for work in sends:
        work.wait()
    assert len(seen["forward"]) == len(seen["backward"]) == micro


@on("AA", "AB")
def lists_of_objects(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.send_object_list([{"a": 1}, "two", None], dst=1)
    else:
        got: list[Any] = [None] * 3
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [{"a": 1}, "two", None]


@on("AABB")
def a_group_of_some_ranks(ctx: Context) -> None:
    group = dist.new_group([3, 1])  # ranks of the group are in sorted order
    if ctx.rank == 1:
        works = [
            dist.isend(torch.tensor([5.0]), 3, group=group),
            dist.isend(torch.tensor([6.0]), 3),
        ]
        for work in works:
            assert work is not None
            work.wait()
    elif ctx.rank == 3:
        first, second = torch.empty(1), torch.empty(1)
        dist.recv(second, 1)
        dist.recv(first, 1, group=group)
        assert (first.item(), second.item()) == (5.0, 6.0)
    if ctx.rank in (1, 3):
        dist.destroy_process_group(group)


@on("AAAA", "AABB", "ABCD")
def messages_from_any_rank(ctx: Context) -> None:
    """Rank 0 takes what the others send; those of one rank come in its order."""
    for tag, numel in enumerate((1, 0, 300_000, 5000)):
        if ctx.rank != 0:
            for k in range(3):
                dist.send(torch.full((numel,), ctx.rank * 10.0 + k), 0, tag=tag)
            continue
        came = [0] * ctx.size
        for _ in range(3 * (ctx.size - 1)):
            got = torch.empty(numel)
            source = dist.recv(got, tag=tag)
            assert bool((got == source * 10 + came[source]).all())
            came[source] += 1
        assert came == [0] + [3] * (ctx.size - 1)


@on("AAA", "ABC")
def receives_from_any_rank_in_flight(ctx: Context) -> None:
    """Several at once, beside one that names its sender and comes first."""
    if ctx.rank != 0:
        for k in range(3):
            dist.send(torch.tensor([ctx.rank * 10.0 + k]), 0)
        return
    named, *got = [torch.empty(1) for _ in range(6)]
    works = [dist.irecv(named, 1), *(dist.irecv(tensor) for tensor in got)]
    sources = []
    for work in works:
        assert work is not None
        work.wait()
        sources.append(work._source_rank())
    values = [named.item(), *(t.item() for t in got)]
    assert values[0] == 10.0
    assert sources == [value // 10 for value in values]
    for rank in (1, 2):
        of_it = [value for value in values if value // 10 == rank]
        assert of_it == [rank * 10.0 + k for k in range(3)]


@on("AA")
def calls_that_are_refused(ctx: Context) -> None:
    with pytest.raises(ValueError, match=f"rank {ctx.rank} .*itself"):
        dist.isend(torch.empty(1), ctx.rank)


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)


# ---- failures


def unequal(ctx: Context, theirs: torch.Tensor, mine: torch.Tensor, tag: int) -> None:
    if ctx.rank == 0:
        dist.isend(theirs, 1, tag=tag).wait()  # type: ignore[union-attr]
        time.sleep(0.5)  # what is small may have left between hosts before the receiver calls
        dist.send(theirs, 1, tag=tag)
    else:
        dist.recv(mine, 0, tag=tag)


@pytest.mark.parametrize("layout", ["AA", "AB"])
@pytest.mark.parametrize(
    ("mine", "texts"),
    [
        (torch.empty(8), ("16 bytes of float32", "32 bytes of float32")),
        (torch.empty(4, dtype=torch.int32), ("16 bytes of float32", "16 bytes of int32")),
    ],
)
def test_a_receiver_of_something_else(
    layout: str, mine: torch.Tensor, texts: tuple[str, str]
) -> None:
    with fresh(layout) as world:
        for failure in world.failures(unequal, torch.ones(4), mine, 3):
            assert failure.kind == "DistBackendError", failure.trace
            for text in (*texts, "rank 0", "rank 1", "tag 3"):
                assert text in failure.message, failure.message


def called(ctx: Context, seconds: float, known: bool, name: str, tag: int = 0) -> float:
    """A first message, if ``known``, and one of which the other rank does not take its part.

    That one may take so many ``seconds``.
    """
    tensor = torch.zeros(1000)
    if known:
        dist.send(tensor, 1, tag=tag) if ctx.rank == 0 else dist.recv(tensor, 0, tag=tag)
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    began = time.monotonic()
    if name == "send":
        work = dist.isend(torch.zeros(1 << 20), 1, tag=tag)
    elif name == "recv":
        work = dist.irecv(tensor, 0, tag=tag)
    elif name == "any":
        work = dist.irecv(tensor, tag=tag)
    else:
        return 0.0
    assert time.monotonic() - began < 0.5
    assert work is not None
    with contextlib.suppress(ImportError):
        work.wait()
    return time.monotonic() - began


CASES = [
    (known, name, layout)
    for known in (False, True)
    for name in ("send", "recv")
    for layout in ("AA", "AB")
]
ANY = [(known, layout) for known in (False, True) for layout in ("AA", "AB")]


def test_a_rank_that_does_not_call() -> None:
    with at_once((case, case[2]) for case in CASES) as worlds:
        for (known, name, _), world in worlds.items():
            caller = 0 if name == "send" else 1
            world.submit_to([caller], called, DEADLINE, known, name, 7)
            world.submit_to([1 - caller], called, DEADLINE, known, "nothing", 7)
        for (known, name, layout), world in worlds.items():
            caller = 0 if name == "send" else 1
            world.collect([1 - caller])
            (failure,) = raised_by(world, [caller], DEADLINE + GRACE)
            other, matching = 1 - caller, "recv" if name == "send" else "send"
            wanted = (
                f"{name} {'to' if name == 'send' else 'from'} rank {other} (host-{layout[other]})",
                ", tag 7, ",
                f"timed out after {DEADLINE} s on rank {caller} (host-{layout[caller]})",
                f"rank {other} (host-{layout[other]}) has not called the matching {matching}",
            )
            for text in wanted:
                assert text in failure.message, failure.message
            page = " ".join(world.log(0).split())
            number = 2 if known else 1
            group = "0/rank 0 to rank 1, tag 7"
            assert f"not called the {matching} for {name} #{number} of group '{group}'" in page
            assert "different" not in page, page


def test_a_rank_that_is_killed() -> None:
    cases = [*CASES, *((known, "any", layout) for known, layout in ANY)]
    with at_once((case, case[2]) for case in cases) as worlds:
        for (known, name, _), world in worlds.items():
            caller = 0 if name == "send" else 1
            world.submit_to([caller], called, 40, known, name)
            world.submit_to([1 - caller], called, 40, known, "nothing")
        for (_, name, _), world in worlds.items():
            victim = 1 if name == "send" else 0
            world.collect([victim])
            time.sleep(0.1)
            world.signal(victim, signal.SIGKILL)
        for (_, name, layout), world in worlds.items():
            victim = 1 if name == "send" else 0
            (failure,) = raised_by(world, [1 - victim], 20)
            assert failure.kind == "DistBackendError", failure.trace
            other = {"send": "to rank 1", "recv": "from rank 0", "any": "from any rank"}[name]
            for text in (other, f"rank {victim} (host-{layout[victim]})", "ended"):
                assert text in failure.message, failure.message


def left(ctx: Context, name: str) -> str:
    """Destroys the group with a message pending that the other rank takes no part in."""
    dist.barrier()
    work: Any = None
    if ctx.rank == 0:
        work = dist.isend(torch.ones(5), 1) if name == "send" else dist.irecv(torch.ones(5), 1)
        time.sleep(0.3)
    dist.barrier()
    time.sleep(0.5 * ctx.rank)
    dist.destroy_process_group()
    if work is None:
        return ""
    with pytest.raises(RuntimeError) as raised:
        work.wait()
    return str(raised.value)


def test_no_rank_sends_to_a_receive_from_any() -> None:
    with at_once((case, case[1]) for case in ANY) as worlds:
        for (known, _), world in worlds.items():
            world.submit_to([1], called, DEADLINE, known, "any", 7)
            world.submit_to([0], called, DEADLINE, known, "nothing", 7)
        for (_, layout), world in worlds.items():
            world.collect([0])
            (failure,) = raised_by(world, [1], DEADLINE + GRACE)
            for text in (
                "recv from any rank of 4000 bytes, float32, tag 7, #1 of group '0'",
                f"timed out after {DEADLINE} s on rank 1 (host-{layout[1]})",
                "no rank has called the matching send",
            ):
                assert text in failure.message, failure.message
            page = " ".join(world.log(0).split())
            assert "recv #1 of group '0/any rank to rank 1, tag 7'" in page, page


@pytest.mark.parametrize("layout", ["AA", "AB"])
@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_group_that_is_destroyed_with_a_message_pending(layout: str, name: str) -> None:
    with fresh(layout) as world:
        text = world.run(left, name)[0]
        matching = "recv" if name == "send" else "send"
        assert f"{name} {'to' if name == 'send' else 'from'} rank 1" in text
        assert "destroyed" in text and f"has not called the matching {matching}" in text
        nothing_is_left(world)


def waits(ctx: Context) -> None:
    dist.barrier()
    if ctx.rank == 0:
        dist.destroy_process_group()
        time.sleep(2)
        return
    dist.recv(torch.empty(5), 0)


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_the_other_rank_has_destroyed_the_group(layout: str) -> None:
    with fresh(layout) as world:
        world.submit(waits)
        outcome = world.outcomes([1], timeout=10)[1]
        assert isinstance(outcome, Failure)
        assert "recv from rank 0" in outcome.message and "destroyed" in outcome.message


def nothing_is_left(world: Any) -> None:
    until = time.monotonic() + 5
    while world._store.num_keys() > 0 and time.monotonic() < until:
        time.sleep(0.05)
    assert world._store.num_keys() == 0, world._store.list_keys()
    assert not shared_memory_left()


def passes_and_leaves(ctx: Context) -> None:
    both_directions_at_once(ctx)
    order = range(ctx.size)
    for source in order:
        for target in order:
            if source != target and ctx.rank in (source, target):
                t = torch.ones(3)
                dist.send(t, target, tag=4) if ctx.rank == source else dist.recv(t, source, tag=4)
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_nothing_is_left(layout: str) -> None:
    with fresh(layout) as world:
        world.run(passes_and_leaves)
        nothing_is_left(world)
