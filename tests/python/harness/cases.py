"""One collective call and all checks of its result. Runs in the ranks of a world.

``begin`` makes the buffers (surrounded by guard bytes), calls the collective through the API form
of the case, and returns a ``Call``. Its ``finish`` waits, then checks that the outputs equal the
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


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    wrong = (model.raw(got) != model.raw(wanted)).nonzero().flatten()
    first = int(wrong[0]) // got.dtype.itemsize if wrong.numel() else -1
    if got.numel() != wanted.numel() or first < 0:
        return f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    a, b = model.copy(got)[first].item(), model.copy(wanted)[first].item()
    return f"{wrong.numel()} of {wanted.nbytes} bytes differ, element {first} is {a}, wanted {b}"


def _expect(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert model.same_bits(got, wanted), f"{what}: {_difference(got, wanted)}"


@dataclass
class Sum:
    """The reduction of ``inputs``, one per rank; any of ``owners`` may have added each element."""

    inputs: list[torch.Tensor]
    owners: list[int]

    def numel(self) -> int:
        return self.inputs[0].numel()


class Call:
    """A call on one rank: guarded buffers, the call in its form, the checks afterwards."""

    def __init__(self, case: Case, group: Any, layout: str, me: int) -> None:
        self.case, self.group, self.layout, self.me = case, group, layout, me
        self.size = len(layout)
        self.root = case.seed % self.size
        self.arena = Arena(case.offset)
        self.more = {"group": group, "async_op": case.asynchronous}
        self.outputs: list[torch.Tensor] = []
        self.wanted: list[torch.Tensor | Sum] = []  # of the outputs
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what must not change, its values
        self.work: Any = None

    def values(self, rank: int, numel: int, number: int = 0) -> torch.Tensor:
        """What the rank puts into the tensor of this number."""
        return model.data(self.case.seed + number, rank, self.case.dtype, numel)

    def input(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A buffer, or ``into``, with these values, which the call must not change."""
        tensor = self.arena.of(values) if into is None else into
        assign(tensor, values)
        self.kept.append((tensor, values))
        return tensor

    def output(self, wanted: torch.Tensor | Sum, into: torch.Tensor | None = None) -> torch.Tensor:
        """A buffer, or ``into``, which must have these values afterwards."""
        if into is None:
            into = self.arena.empty(wanted.numel(), self.case.dtype)
        self.outputs.append(into)
        self.wanted.append(wanted)
        return into

    def functional(self, results: Sequence[torch.Tensor]) -> None:
        """These lazy tensors are the outputs."""
        self.outputs[:] = results
        if not self.case.asynchronous:
            self.outputs[:] = map(functional.wait_tensor, results)

    def managed(self, calls: Sequence[Callable[[], Any]]) -> None:
        """All calls as one operation, by torch's coalescing manager."""
        c10d, later = dist.distributed_c10d, self.case.asynchronous
        with c10d._coalescing_manager(group=self.group, async_ops=later) as manager:
            for call in calls:
                call()
        self.work = manager if later else None

    def finish(self) -> str:
        """Wait, check, and return a digest of the result."""
        if self.work is not None:
            self.work.wait()
        if self.case.form.startswith("functional") and self.case.asynchronous:
            self.outputs[:] = map(functional.wait_tensor, self.outputs)
        try:
            self._verify()
        except AssertionError as error:
            raise AssertionError(f"{self.case} (seed {self.case.seed}): {error}") from None
        return _digest(self.outputs)

    def _verify(self) -> None:
        for number, (tensor, wanted) in enumerate(zip(self.outputs, self.wanted, strict=True)):
            if isinstance(wanted, Sum):
                self._expect_reduced(tensor, wanted, f"output {number}")
            else:
                _expect(tensor, wanted, f"output {number}")
        for number, (tensor, values) in enumerate(self.kept):
            _expect(tensor, values, f"input {number} was changed")
        self.arena.check()

    def _expect_reduced(self, got: torch.Tensor, wanted: Sum, what: str) -> None:
        inputs, operation = wanted.inputs, self.case.operation
        assert got.shape == inputs[0].shape, f"{what}: shape {tuple(got.shape)}"
        if got.numel() == 0:
            return
        got = model.copy(got).cpu()  # aligned, and where the inputs are
        # Only 16-bit sums depend on the owner; all other results are the same on every host.
        depends = got.dtype in model.HALF and operation in ("SUM", "AVG", "PRODUCT")
        owners = wanted.owners if depends else wanted.owners[:1]
        if depends and self.case.collective == "all_reduce":
            whole = model.reduced(inputs, self.layout, operation, None)
            if model.same_bits(got, whole):
                return
        candidates = [model.reduced(inputs, self.layout, operation, owner) for owner in owners]
        bits = {2: torch.int16, 1: torch.int8, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
        good = torch.zeros(got.shape, dtype=torch.bool)
        for candidate in candidates:
            good |= candidate.view(bits) == got.view(bits)
        assert bool(good.all()), f"{what}: {_difference(got, candidates[0])}"


def begin(ctx: Context, case: Case, group: Any = None, ranks: Sequence[int] | None = None) -> Call:
    """Start ``case`` on ``group``, which consists of ``ranks`` (default: the whole world)."""
    ranks = list(range(ctx.size)) if ranks is None else list(ranks)
    layout = layouts.restrict(ctx.layout, ranks)
    group = dist.group.WORLD if group is None else group
    call = Call(case, group, layout, ranks.index(ctx.rank))
    start = {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "all_to_all": _all_to_all,
        "gather": _gather,
        "scatter": _scatter,
    }
    start[case.collective](call)
    return call


def check(ctx: Context, case: Case, group: Any = None, ranks: Sequence[int] | None = None) -> str:
    return begin(ctx, case, group, ranks).finish()


def check_all(ctx: Context, cases: Sequence[Case]) -> list[str]:
    return [check(ctx, case) for case in cases]


def check_in_flight(ctx: Context, cases: Sequence[Case], order: Sequence[int]) -> list[str]:
    """Start all cases in the given sequence, finish them in ``order``."""
    running = [begin(ctx, case) for case in cases]
    digests = {i: running[i].finish() for i in order}
    return [digests[i] for i in range(len(cases))]


# Newer names for the same, where this torch has them.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _all_gather(call: Call) -> None:
    case, me, size, more = call.case, call.me, call.size, call.more
    inputs: list[torch.Tensor] = []
    outputs: list[list[torch.Tensor]] = []  # per tensor: one, or one per rank
    for number, numel in enumerate(case.numels):
        parts = [call.values(rank, numel, number) for rank in range(size)]
        by_rank = case.form in ("list", "list_coalesced")
        outs = [call.output(wanted) for wanted in (parts if by_rank else [torch.cat(parts)])]
        own = outs[me] if by_rank else outs[0][me * numel : (me + 1) * numel]
        inputs.append(call.input(parts[me], own if case.place == "in_place" else None))
        outputs.append(outs)
    flat = [outs[0] for outs in outputs]
    if case.form == "manager":
        call.managed(
            [
                lambda o=o, i=i: dist.all_gather_into_tensor(o, i, **more)
                for o, i in zip(flat, inputs, strict=True)
            ]
        )
    elif case.form == "list":
        call.work = dist.all_gather(outputs[0], inputs[0], **more)
    elif case.form == "list_coalesced":
        per_rank = [list(tensors) for tensors in zip(*outputs, strict=True)]
        call.work = dist.all_gather_coalesced(per_rank, inputs, **more)
    elif case.form == "functional":
        call.functional([functional.all_gather_tensor(inputs[0], 0, call.group)])
    elif case.form == "functional_coalesced":
        call.functional(functional.all_gather_into_tensor_coalesced(inputs, call.group))
    else:
        gather = _gather_single if case.form == "single" else dist.all_gather_into_tensor
        out = flat[0].view(size, -1) if case.form == "stack" and flat[0].numel() else flat[0]
        call.work = gather(out, inputs[0], **more)


def _reduce_scatter(call: Call) -> None:
    case, me, size = call.case, call.me, call.size
    more = {**call.more, "op": getattr(dist.ReduceOp, case.operation)}
    inputs: list[list[torch.Tensor]] = []  # per tensor: one, or one per rank
    outputs: list[torch.Tensor] = []
    for number, numel in enumerate(case.numels):
        sources = [call.values(rank, numel * size, number) for rank in range(size)]
        blocks = [sources[me][r * numel : (r + 1) * numel] for r in range(size)]
        if case.form == "list":
            ins = slots = [call.arena.of(block) for block in blocks]
        else:
            ins = [call.arena.of(sources[me])]
            slots = [ins[0][r * numel : (r + 1) * numel] for r in range(size)]
        taken = {"apart": None, "in_place": me, "other_slot": (me + 1) % size}[case.place]
        for rank, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            if rank != taken:
                call.input(block, slot)
        wanted = Sum([source[me * numel : (me + 1) * numel] for source in sources], [me])
        outputs.append(call.output(wanted, None if taken is None else slots[taken]))
        inputs.append(ins)
    flat = [ins[0] for ins in inputs]
    if case.form == "manager":
        call.managed(
            [
                lambda o=o, i=i: dist.reduce_scatter_tensor(o, i, **more)
                for o, i in zip(outputs, flat, strict=True)
            ]
        )
    elif case.form == "list":
        call.work = dist.reduce_scatter(outputs[0], inputs[0], **more)
    elif case.form == "functional":
        call.functional([functional.reduce_scatter_tensor(flat[0], case.operation, 0, call.group)])
    elif case.form == "functional_coalesced":
        zeros = [0] * len(flat)
        call.functional(
            functional.reduce_scatter_tensor_coalesced(flat, case.operation, zeros, call.group)
        )
    else:
        scatter = _scatter_single if case.form == "single" else dist.reduce_scatter_tensor
        source = flat[0].view(size, -1) if case.form == "stack" and flat[0].numel() else flat[0]
        call.work = scatter(outputs[0], source, **more)


def _all_reduce(call: Call) -> None:
    case = call.case
    more = {**call.more, "op": getattr(dist.ReduceOp, case.operation)}
    # The algorithm chooses the host that sums an element: any host may own it.
    owners = [ranks[0] for ranks in layouts.hosts(call.layout)]
    tensors = []
    for number, numel in enumerate(case.numels):
        sources = [call.values(rank, numel, number) for rank in range(call.size)]
        tensors.append(call.output(Sum(sources, owners), call.arena.of(sources[call.me])))
    if case.form == "manager":
        call.managed([lambda t=t: dist.all_reduce(t, **more) for t in tensors])
    elif case.form == "coalesced":
        call.work = dist.all_reduce_coalesced(tensors, **more)
    elif case.form == "functional":
        call.functional([functional.all_reduce(tensors[0], case.operation, call.group)])
    elif case.form == "functional_coalesced":
        call.functional(functional.all_reduce_coalesced(tensors, case.operation, call.group))
    else:
        call.work = dist.all_reduce(tensors[0], **more)


def _broadcast(call: Call) -> None:
    numel = call.case.numels[0]
    sent, mine = call.values(call.root, numel), call.values(call.me, numel)
    tensor = call.output(sent, call.arena.of(mine))
    call.work = dist.broadcast(tensor, group_src=call.root, **call.more)


def _reduce(call: Call) -> None:
    sources = [call.values(rank, call.case.numels[0]) for rank in range(call.size)]
    mine = sources[call.me]
    wanted = Sum(sources, [call.me]) if call.me == call.root else mine
    tensor = call.output(wanted, call.arena.of(mine))
    operation = getattr(dist.ReduceOp, call.case.operation)
    call.work = dist.reduce(tensor, op=operation, group_dst=call.root, **call.more)


def _all_to_all(call: Call) -> None:
    case, me, size, more = call.case, call.me, call.size, call.more

    def block(source: int, target: int) -> torch.Tensor:
        numel = case.numels[0]
        if case.form == "unequal":  # none, a third, two thirds, or all
            numel = numel * ((source * 3 + target * 5 + case.seed) % 4) // 3
        return call.values(source * size + target, numel)

    sent = [block(me, target) for target in range(size)]
    taken = [block(source, me) for source in range(size)]
    if case.form == "list":
        inputs, outputs = [call.input(part) for part in sent], [call.output(p) for p in taken]
        call.work = dist.all_to_all(outputs, inputs, **more)
        return
    source, target = call.input(torch.cat(sent)), call.output(torch.cat(taken))
    splits: list[Any] = [None, None]
    if case.form == "unequal":
        splits = [[part.numel() for part in parts] for parts in (taken, sent)]
    if case.form == "functional":
        call.functional([functional.all_to_all_single(source, *splits, call.group)])
    else:
        call.work = dist.all_to_all_single(target, source, *splits, **more)


def _gather(call: Call) -> None:
    parts = [call.values(rank, call.case.numels[0]) for rank in range(call.size)]
    tensor = call.input(parts[call.me])
    outputs = [call.output(part) for part in parts] if call.me == call.root else None
    call.work = dist.gather(tensor, outputs, group_dst=call.root, **call.more)


def _scatter(call: Call) -> None:
    parts = [call.values(rank, call.case.numels[0]) for rank in range(call.size)]
    inputs = [call.input(part) for part in parts] if call.me == call.root else None
    tensor = call.output(parts[call.me])
    call.work = dist.scatter(tensor, inputs, group_src=call.root, **call.more)


def start_all_gather(ctx: Context, numel: int = 1000, seed: int = 0) -> tuple[Any, Any, Any]:
    """An AllGather in flight: its Work, its output, and the values that the output will hold."""
    parts = [model.data(seed, rank, torch.float32, numel) for rank in range(ctx.size)]
    out = torch.empty(numel * ctx.size)
    work = dist.all_gather_into_tensor(out, parts[ctx.rank], async_op=True)
    return work, out, torch.cat(parts)
