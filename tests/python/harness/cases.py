"""One collective call and all checks of its result. Runs in the ranks of a world.

``begin`` makes the buffers (surrounded by guard bytes), calls the collective through the API form
of the case, and returns a ``Running``. Its ``finish`` waits, then checks that the outputs equal the
model's and that inputs and guard bytes have not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness import layout as layouts
from harness import model
from harness.worker import Context

ALL_GATHER_FORMS = (
    "base",
    "stack",
    "single",
    "list",
    "list_coalesced",
    "manager",
    "functional",
    "functional_coalesced",
)
REDUCE_SCATTER_FORMS = (
    "base",
    "stack",
    "single",
    "list",
    "manager",
    "functional",
    "functional_coalesced",
)
ALL_REDUCE_FORMS = ("base", "coalesced", "manager", "functional", "functional_coalesced")
FORMS = {
    "all_gather": ALL_GATHER_FORMS,
    "reduce_scatter": REDUCE_SCATTER_FORMS,
    "all_reduce": ALL_REDUCE_FORMS,
}
# And those of tensors on CPUs alone.
HOST_FORMS = {
    **FORMS,
    "broadcast": ("base",),
    "reduce": ("base",),
    "all_to_all": ("base", "unequal", "list", "functional"),
    "gather": ("base",),
    "scatter": ("base",),
}
# Those that move data, of any type, and compute nothing.
MOVES = ("all_gather", "broadcast", "all_to_all", "gather", "scatter")
# Those after which all ranks hold the same.
ALIKE = ("all_gather", "all_reduce", "broadcast")
# Forms that carry several tensors in one operation.
MANY = ("manager", "list_coalesced", "functional_coalesced", "coalesced")
GUARD = 64
GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class Case:
    collective: str
    form: str = "base"
    dtype: torch.dtype = torch.float32
    # Elements of one rank's shard; all_reduce: of the tensor; all_to_all: of the block for a rank.
    numels: tuple[int, ...] = (1000,)
    operation: str = "SUM"
    place: str = "apart"  # or "in_place"; reduce_scatter also "other_slot"
    offset: int = 0  # distance of every buffer from its alignment, in bytes
    asynchronous: bool = True
    seed: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        numels = "+".join(map(str, self.numels))
        return f"{self.collective}.{self.form}({dtype} x {numels}, {self.operation}, {self.place})"


@dataclass
class Running:
    case: Case
    wait: Callable[[], None]
    verify: Callable[[], str]

    def finish(self) -> str:
        """Wait, check, and return a digest of the result."""
        self.wait()
        try:
            return self.verify()
        except AssertionError as error:
            raise AssertionError(f"{self.case} (seed {self.case.seed}): {error}") from None


class Arena:
    """Tensors with guard bytes around them, at a chosen distance from alignment."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._regions: list[tuple[torch.Tensor, int, int]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        start = GUARD + self._offset
        memory = bytearray(bytes([GUARD_BYTE]) * (start + size + GUARD))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._regions.append((whole, start, start + size))
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        # Unlike view, frombuffer accepts an address that is no multiple of the item size.
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        tensor = self.empty(values.numel(), values.dtype)
        assign(tensor, values)
        return tensor

    def check(self) -> None:
        for whole, start, end in self._regions:
            around = torch.cat([whole[:start], whole[end:]])
            assert bool((around == GUARD_BYTE).all()), "bytes outside a buffer were written"


def assign(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies byte by byte: torch's own copy of complex numbers crashes if they are not aligned."""
    model.raw(tensor).copy_(model.raw(values))


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    state = hashlib.sha1()
    for tensor in tensors:
        state.update(model.raw(tensor).numpy().tobytes())
    return state.hexdigest()


def _waiter(work: Any) -> Callable[[], None]:
    if work is None:
        return lambda: None
    return lambda: (work.wait(), None)[1]


def _managed(calls: Sequence[Callable[[], Any]], group: Any, asynchronous: bool) -> Any:
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=asynchronous) as manager:
        for call in calls:
            call()
    return manager if asynchronous else None


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    wrong = (model.raw(got) != model.raw(wanted)).nonzero().flatten()
    first = int(wrong[0]) // got.dtype.itemsize if wrong.numel() else -1
    if got.numel() != wanted.numel() or first < 0:
        return f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    a, b = model.copy(got)[first].item(), model.copy(wanted)[first].item()
    return f"{wrong.numel()} of {wanted.nbytes} bytes differ, element {first} is {a}, wanted {b}"


def _expect(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert model.same_bits(got, wanted), f"{what}: {_difference(got, wanted)}"


def _interesting(*options: Any) -> Any:
    """The first option that this torch has."""
    return next((option for option in options if option is not None), None)


_gather = _interesting(getattr(dist, "all_gather_into_tensor", None))
_gather_single = _interesting(getattr(dist, "all_gather_single", None), _gather)
_scatter = _interesting(getattr(dist, "reduce_scatter_tensor", None))
_scatter_single = _interesting(getattr(dist, "reduce_scatter_single", None), _scatter)


def begin(
    ctx: Context, case: Case, group: Any = None, ranks: Sequence[int] | None = None
) -> Running:
    """Start ``case`` on ``group``, which consists of ``ranks`` (default: the whole world)."""
    ranks = list(range(ctx.size)) if ranks is None else list(ranks)
    layout = layouts.restrict(ctx.layout, ranks)
    me = ranks.index(ctx.rank)
    if group is None:
        group = dist.group.WORLD
    start = {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "all_to_all": _all_to_all,
        "gather": _gather_to_root,
        "scatter": _scatter_from_root,
    }[case.collective]
    return start(case, group, layout, me, ctx.exact)


def check(ctx: Context, case: Case, group: Any = None, ranks: Sequence[int] | None = None) -> str:
    return begin(ctx, case, group, ranks).finish()


def check_all(ctx: Context, cases: Sequence[Case]) -> list[str]:
    return [check(ctx, case) for case in cases]


def check_in_flight(ctx: Context, cases: Sequence[Case], order: Sequence[int]) -> list[str]:
    """Start all cases in the given sequence, finish them in ``order``."""
    running = [begin(ctx, case) for case in cases]
    digests = {i: running[i].finish() for i in order}
    return [digests[i] for i in range(len(cases))]


def _all_gather(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    arena = Arena(case.offset)
    shards = [
        [model.data(case.seed + i, rank, case.dtype, numel) for rank in range(size)]
        for i, numel in enumerate(case.numels)
    ]
    by_rank = case.form in ("list", "list_coalesced")
    inputs: list[torch.Tensor] = []
    outputs: list[list[torch.Tensor]] = []  # per tensor: one, or one per rank
    for numel, parts in zip(case.numels, shards, strict=True):
        if by_rank:
            outs = [arena.empty(numel, case.dtype) for _ in range(size)]
            own = outs[me]
        else:
            outs = [arena.empty(numel * size, case.dtype)]
            own = outs[0][me * numel : (me + 1) * numel]
        if case.place == "in_place":
            assign(own, parts[me])
            inputs.append(own)
        else:
            inputs.append(arena.of(parts[me]))
        outputs.append(outs)
    sync = not case.asynchronous
    flat = [outs[0] for outs in outputs]

    if case.form == "manager":
        calls = [
            lambda o=o, i=i: _gather(o, i, group=group, async_op=case.asynchronous)
            for o, i in zip(flat, inputs, strict=True)
        ]
        wait = _waiter(_managed(calls, group, case.asynchronous))
    elif case.form == "list":
        wait = _waiter(dist.all_gather(outputs[0], inputs[0], group=group, async_op=not sync))
    elif case.form == "list_coalesced":
        per_rank = [list(tensors) for tensors in zip(*outputs, strict=True)]
        work = dist.all_gather_coalesced(per_rank, inputs, group=group, async_op=not sync)
        wait = _waiter(work)
    elif case.form == "functional":
        flat[0] = functional.all_gather_tensor(inputs[0], 0, group)
        wait = _functional_waiter(flat, sync)
    elif case.form == "functional_coalesced":
        flat[:] = functional.all_gather_into_tensor_coalesced(inputs, group)
        wait = _functional_waiter(flat, sync)
    else:
        call = _gather_single if case.form == "single" else _gather
        out = flat[0].view(size, -1) if case.form == "stack" and flat[0].numel() else flat[0]
        wait = _waiter(call(out, inputs[0], group=group, async_op=not sync))

    def verify() -> str:
        for i, parts in enumerate(shards):
            for rank, part in enumerate(parts) if by_rank else ():
                _expect(outputs[i][rank], part, f"output {i} of rank {rank}")
            if not by_rank:
                _expect(flat[i], torch.cat(parts), f"output {i}")
            _expect(inputs[i], parts[me], f"input {i} was changed")
        arena.check()
        return _digest([t for outs in outputs for t in outs] if by_rank else flat)

    return Running(case, wait, verify)


def _functional_waiter(tensors: list[torch.Tensor], now: bool) -> Callable[[], None]:
    def wait() -> None:
        tensors[:] = [functional.wait_tensor(tensor) for tensor in tensors]

    if now:
        wait()
        return lambda: None
    return wait


def _reduce_scatter(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    arena = Arena(case.offset)
    operation = getattr(dist.ReduceOp, case.operation)
    sources = [
        [model.data(case.seed + i, rank, case.dtype, numel * size) for rank in range(size)]
        for i, numel in enumerate(case.numels)
    ]
    inputs: list[list[torch.Tensor]] = []  # per tensor: one, or one per rank
    outputs: list[torch.Tensor] = []
    untouched: list[list[torch.Tensor]] = []
    for numel, source in zip(case.numels, sources, strict=True):
        if case.form == "list":
            ins = [arena.of(part) for part in source[me].split(numel)] if numel else []
            ins = ins or [arena.empty(0, case.dtype) for _ in range(size)]
            slots = ins
        else:
            ins = [arena.of(source[me])]
            slots = [ins[0][r * numel : (r + 1) * numel] for r in range(size)]
        taken = {"apart": None, "in_place": me, "other_slot": (me + 1) % size}[case.place]
        outputs.append(arena.empty(numel, case.dtype) if taken is None else slots[taken])
        inputs.append(ins)
        untouched.append([slot for r, slot in enumerate(slots) if r != taken])
    before = [[model.copy(slot) for slot in slots] for slots in untouched]
    sync = not case.asynchronous
    flat = [ins[0] for ins in inputs]

    if case.form == "manager":
        calls = [
            lambda o=o, i=i: _scatter(o, i, op=operation, group=group, async_op=not sync)
            for o, i in zip(outputs, flat, strict=True)
        ]
        wait = _waiter(_managed(calls, group, case.asynchronous))
    elif case.form == "list":
        work = dist.reduce_scatter(
            outputs[0], inputs[0], op=operation, group=group, async_op=not sync
        )
        wait = _waiter(work)
    elif case.form == "functional":
        outputs[0] = functional.reduce_scatter_tensor(flat[0], case.operation, 0, group)
        wait = _functional_waiter(outputs, sync)
    elif case.form == "functional_coalesced":
        outputs[:] = functional.reduce_scatter_tensor_coalesced(
            flat, case.operation, [0] * len(flat), group
        )
        wait = _functional_waiter(outputs, sync)
    else:
        call = _scatter_single if case.form == "single" else _scatter
        source = flat[0].view(size, -1) if case.form == "stack" and flat[0].numel() else flat[0]
        wait = _waiter(call(outputs[0], source, op=operation, group=group, async_op=not sync))

    def verify() -> str:
        for i, (numel, source) in enumerate(zip(case.numels, sources, strict=True)):
            mine = [tensor[me * numel : (me + 1) * numel] for tensor in source]
            _expect_reduced(outputs[i], mine, layout, case.operation, [me], exact, f"output {i}")
            for slot, was in zip(untouched[i], before[i], strict=True):
                _expect(slot, was, f"input {i} was changed")
        arena.check()
        return _digest(outputs)

    return Running(case, wait, verify)


def _all_reduce(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    arena = Arena(case.offset)
    operation = getattr(dist.ReduceOp, case.operation)
    sources = [
        [model.data(case.seed + i, rank, case.dtype, numel) for rank in range(size)]
        for i, numel in enumerate(case.numels)
    ]
    tensors = [arena.of(source[me]) for source in sources]
    sync = not case.asynchronous
    if case.form == "manager":
        calls = [
            lambda t=t: dist.all_reduce(t, op=operation, group=group, async_op=not sync)
            for t in tensors
        ]
        wait = _waiter(_managed(calls, group, case.asynchronous))
    elif case.form == "coalesced":
        work = dist.all_reduce_coalesced(tensors, op=operation, group=group, async_op=not sync)
        wait = _waiter(work)
    elif case.form == "functional":
        tensors[0] = functional.all_reduce(tensors[0], case.operation, group)
        wait = _functional_waiter(tensors, sync)
    elif case.form == "functional_coalesced":
        tensors[:] = functional.all_reduce_coalesced(tensors, case.operation, group)
        wait = _functional_waiter(tensors, sync)
    else:
        wait = _waiter(dist.all_reduce(tensors[0], op=operation, group=group, async_op=not sync))

    def verify() -> str:
        # The algorithm chooses the host that sums an element: any host may own it.
        owners = [ranks[0] for ranks in layouts.hosts(layout)]
        for i, source in enumerate(sources):
            _expect_reduced(
                tensors[i], source, layout, case.operation, owners, exact, f"tensor {i}"
            )
        arena.check()
        return _digest(tensors)

    return Running(case, wait, verify)


def _root(case: Case, size: int) -> int:
    return case.seed % size


def _broadcast(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    root = _root(case, size)
    arena = Arena(case.offset)
    sent = model.data(case.seed, root, case.dtype, case.numels[0])
    tensor = arena.of(model.data(case.seed, me, case.dtype, case.numels[0]))
    work = dist.broadcast(tensor, group=group, group_src=root, async_op=case.asynchronous)

    def verify() -> str:
        _expect(tensor, sent, "the tensor")
        arena.check()
        return _digest([tensor])

    return Running(case, _waiter(work), verify)


def _reduce(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    root = _root(case, size)
    arena = Arena(case.offset)
    sources = [model.data(case.seed, rank, case.dtype, case.numels[0]) for rank in range(size)]
    tensor = arena.of(sources[me])
    operation = getattr(dist.ReduceOp, case.operation)
    work = dist.reduce(
        tensor, op=operation, group=group, group_dst=root, async_op=case.asynchronous
    )

    def verify() -> str:
        if me == root:
            _expect_reduced(tensor, sources, layout, case.operation, [me], exact, "the tensor")
        else:
            _expect(tensor, sources[me], "the tensor of a rank that is not the root was changed")
        arena.check()
        return _digest([tensor])

    return Running(case, _waiter(work), verify)


def _all_to_all(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    arena = Arena(case.offset)

    def block(source: int, target: int) -> torch.Tensor:
        numel = case.numels[0]
        if case.form == "unequal":  # none, a third, two thirds, or all
            numel = numel * ((source * 3 + target * 5 + case.seed) % 4) // 3
        return model.data(case.seed, source * size + target, case.dtype, numel)

    sent = [block(me, target) for target in range(size)]
    taken = [block(source, me) for source in range(size)]
    sync = not case.asynchronous
    if case.form == "list":
        inputs = [arena.of(part) for part in sent]
        outputs = [arena.empty(part.numel(), case.dtype) for part in taken]
        wait = _waiter(dist.all_to_all(outputs, inputs, group=group, async_op=not sync))
    else:
        inputs = [arena.of(torch.cat(sent))]
        outputs = [arena.empty(sum(part.numel() for part in taken), case.dtype)]
        splits = [None, None]
        if case.form == "unequal":
            splits = [[part.numel() for part in parts] for parts in (taken, sent)]
        if case.form == "functional":
            outputs[0] = functional.all_to_all_single(inputs[0], *splits, group)
            wait = _functional_waiter(outputs, sync)
        else:
            wait = _waiter(
                dist.all_to_all_single(
                    outputs[0], inputs[0], *splits, group=group, async_op=not sync
                )
            )

    def verify() -> str:
        _expect(torch.cat([model.copy(t) for t in outputs]), torch.cat(taken), "the output")
        _expect(torch.cat([model.copy(t) for t in inputs]), torch.cat(sent), "the changed input")
        arena.check()
        return _digest(outputs)

    return Running(case, wait, verify)


def _gather_to_root(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    root = _root(case, size)
    arena = Arena(case.offset)
    parts = [model.data(case.seed, rank, case.dtype, case.numels[0]) for rank in range(size)]
    tensor = arena.of(parts[me])
    outputs = [arena.empty(case.numels[0], case.dtype) for _ in range(size if me == root else 0)]
    work = dist.gather(
        tensor, outputs or None, group=group, group_dst=root, async_op=case.asynchronous
    )

    def verify() -> str:
        for rank, output in enumerate(outputs):
            _expect(output, parts[rank], f"the part of rank {rank}")
        _expect(tensor, parts[me], "the changed input")
        arena.check()
        return _digest(outputs)

    return Running(case, _waiter(work), verify)


def _scatter_from_root(case: Case, group: Any, layout: str, me: int, exact: bool) -> Running:
    size = len(layout)
    root = _root(case, size)
    arena = Arena(case.offset)
    parts = [model.data(case.seed, rank, case.dtype, case.numels[0]) for rank in range(size)]
    inputs = [arena.of(part) for part in (parts if me == root else [])]
    tensor = arena.empty(case.numels[0], case.dtype)
    work = dist.scatter(
        tensor, inputs or None, group=group, group_src=root, async_op=case.asynchronous
    )

    def verify() -> str:
        _expect(tensor, parts[me], "the part of this rank")
        for rank, part in enumerate(inputs):
            _expect(part, parts[rank], f"the changed part of rank {rank}")
        arena.check()
        return _digest([tensor])

    return Running(case, _waiter(work), verify)


def _expect_reduced(
    got: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    layout: str,
    operation: str,
    owners: Sequence[int],
    exact: bool,
    what: str,
) -> None:
    assert got.shape == inputs[0].shape, f"{what}: shape {tuple(got.shape)}"
    if got.numel() == 0:
        return
    if got.dtype in model.FLOATING and not exact:
        assert model.near(got, inputs, operation), f"{what} is not the {operation} of the inputs"
        return
    got = model.copy(got).cpu()  # aligned, and where the inputs are
    # Only 16-bit sums depend on the owner; all other results are the same on every host.
    depends = got.dtype in model.HALF and operation in ("SUM", "AVG", "PRODUCT")
    candidates = [
        model.reduced(inputs, layout, operation, owner)
        for owner in (owners if depends else owners[:1])
    ]
    bits = {2: torch.int16, 1: torch.int8, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    good = torch.zeros(got.shape, dtype=torch.bool)
    for candidate in candidates:
        good |= candidate.view(bits) == got.view(bits)
    assert bool(good.all()), f"{what}: {_difference(got, candidates[0])}"


def start_all_gather(ctx: Context, numel: int = 1000, seed: int = 0) -> tuple[Any, Any, Any]:
    """An AllGather in flight: its Work, its output, and the values that the output will hold."""
    parts = [model.data(seed, rank, torch.float32, numel) for rank in range(ctx.size)]
    out = torch.empty(numel * ctx.size)
    work = dist.all_gather_into_tensor(out, parts[ctx.rank], async_op=True)
    return work, out, torch.cat(parts)
