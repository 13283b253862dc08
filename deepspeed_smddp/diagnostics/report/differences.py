"""Ranks that call unlike things: the first difference of a group, and groups in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from deepspeed_smddp.diagnostics.report.dump import Operation
from deepspeed_smddp.diagnostics.report.job import Cause, GroupView, Job, Stall, Weight
from deepspeed_smddp.diagnostics.report.stack import Doing, doing, module_of
from deepspeed_smddp.diagnostics.report.wording import (
    ZERO3,
    count,
    named,
    numbered,
    rank_list,
    size,
    verb,
)

ALIKE = "ZeRO-3 needs all ranks to run the same modules in the same order"
_ZERO = "deepspeed.runtime.zero."
_GENERATES = {"generate", "_sample", "_beam_search", "_greedy_search"}
_MOST_SIDES = 4
_MOST_CYCLES = 3
# Of the others each rank may have bytes of its own: scatter, gather, all_to_all and the like.
_SAME_BYTES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
# What a thread may stand in while it waits for an operation whose wait is not recorded.
_WAITS = (Doing.COLLECTIVE, Doing.DEVICE, Doing.BACKWARD, Doing.LOCK, Doing.NOTHING)
_Signature = tuple[str, int, str, str]
_Hold = tuple[Stall, list[int], Stall]  # ranks that wait in the first and are late for the second


def label(job: Job, stall: Stall) -> str:
    """What the ranks that wait run of a model: the label of the operation, or else of their stacks.

    "" if it is nothing of ZeRO-3's.
    """
    if stall.operation.label.startswith(ZERO3):
        return stall.operation.label
    found = (_module_run(job, rank) for rank in stall.waiting)
    return next((f"{ZERO3} module {name}" for name in found if name), "")


def _module_run(job: Job, rank: int) -> str:
    """The class of the innermost module for which ZeRO-3 works in a thread of the rank."""
    for stack in job.dumps[rank].stacks:
        at = [i for i, f in enumerate(stack.frames) if module_of(f).startswith(_ZERO)]
        owners = [f.owner for f in stack.frames[: at[-1]] if f.owner] if at else []
        if owners:
            return owners[-1]
    return ""


def remedy(job: Job, ranks: Iterable[int]) -> str:
    """``synced_gpus=True`` if one of the ranks generates text, and else what to change."""
    stacks = [stack for rank in ranks if rank in job.dumps for stack in job.dumps[rank].stacks]
    if any(frame.function in _GENERATES for stack in stacks for frame in stack.frames):
        return (
            "pass synced_gpus=True to generate(), so that ranks that are done run the model until "
            "all are"
        )
    return (
        "run the module on all ranks: take it out of `if rank == 0` and of loops of unlike length; "
        "a rank whose batch has no image (or no token for an expert) runs it on a dummy input, or "
        "name the module to deepspeed.utils.set_z3_leaf_modules"
    )


def two_threads(job: Job) -> str:
    """What to do if two threads of a rank use one group, in an order of chance; else ""."""
    for view in job.groups.values():
        for rank, ring in view.rings.items():
            waits = sum(op.waited_for for op in ring.values())
            stacks = job.dumps[rank].stacks if waits > 1 else []
            places = [doing(s.frames) for s in stacks if not s.main]
            place = next((p.where for p in places if p.doing is Doing.COLLECTIVE), "")
            if place:
                return (
                    f"give the other thread of rank {rank}, {place}, a group of its own "
                    f"(torch.distributed.new_group; async_save(..., process_group=...)): it uses "
                    f"group '{view.name}' beside the main thread"
                )
    return ""


@dataclass(frozen=True)
class Side:
    """Ranks that called one and the same operation."""

    ranks: tuple[int, ...]
    operation: Operation

    @property
    def text(self) -> str:
        """``all_gather of 4 MiB for layers.1``."""
        shown = self.operation.operation
        if self.operation.bytes > 0:
            shown += f" of {size(self.operation.bytes)}"
        if self.operation.label:
            shown += f" for {self.operation.label}"
        return shown


@dataclass(frozen=True)
class Difference:
    """Operation ``sequence`` of a group, by what the ranks called; the most ranks come first.

    ``what`` is "operation", "size", "dtype" or "label": the first of them that differs. ``after``
    is if the operation before is alike in the rings of these ranks. ``ongoing`` is if it has not
    ended on all of them.
    """

    group: GroupView
    sequence: int
    sides: tuple[Side, ...]
    what: str
    after: bool
    ongoing: bool

    @property
    def rows(self) -> list[str]:
        """One line for each side: ``ranks 0-2: all_gather of 4 MiB, float32``."""
        shown = []
        for side in self.sides[:_MOST_SIDES]:
            # With the dtype only where it tells something.
            dtype = f", {side.operation.dtype or 'no dtype'}" if self.what == "dtype" else ""
            shown.append(f"{rank_list(side.ranks)}: {side.text}{dtype}")
        more = len(self.sides) - _MOST_SIDES
        return [*shown, f"and {count(more, 'other call')}"] if more > 0 else shown

    @property
    def odd(self) -> Side | None:
        """The one side that differs from the others, if there is one."""
        if len(self.sides) == 2 and len(self.sides[0].ranks) > len(self.sides[1].ranks):
            return self.sides[1]
        return None

    @property
    def of_zero3(self) -> bool:
        """If a side runs a module of ZeRO-3."""
        return any(side.operation.label.startswith(ZERO3) for side in self.sides)


def job_differences(job: Job) -> list[tuple[GroupView, list[Difference]]]:
    """For every group that has one, its first difference, and the first of more than labels."""
    found = [(view, list(_first_differences(view))) for view in job.groups.values()]
    return [(view, differences) for view, differences in found if differences]


def _first_differences(view: GroupView) -> Iterator[Difference]:
    calls: dict[int, dict[_Signature, list[int]]] = {}
    for rank, ring in view.rings.items():
        for sequence, op in ring.items():
            name = "message" if op.is_message else op.operation
            label = "" if op.is_message else op.label  # its two ranks run unlike code
            signature = (name, _bytes(op), op.dtype, label)
            calls.setdefault(sequence, {}).setdefault(signature, []).append(rank)
    labels_differ = False
    for sequence in sorted(s for s, by in calls.items() if len(by) > 1):
        what = _what(list(calls[sequence]))
        if not what or (what == "label" and labels_differ):
            continue
        of_ranks = calls[sequence].values()
        sides = [Side(tuple(ranks), view.rings[ranks[0]][sequence]) for ranks in of_ranks]
        sides.sort(key=lambda s: (-len(s.ranks), s.ranks[0]))
        before = calls.get(sequence - 1, {})
        ranks = {rank for side in sides for rank in side.ranks}
        alike = len(before) == 1 and ranks <= set(next(iter(before.values())))
        ongoing = any(view.rings[r][sequence].state != "done" for r in ranks)
        yield Difference(view, sequence, tuple(sides), what, alike, ongoing)
        if what != "label":
            return
        labels_differ = True


def _bytes(operation: Operation) -> int:
    alike = operation.kind in _SAME_BYTES or operation.is_message
    return operation.bytes if alike else 0


def _what(signatures: list[_Signature]) -> str:
    for at, what in enumerate(("operation", "size", "dtype", "label")):
        # An operation without a dtype differs from none.
        if len({s[at] for s in signatures if s[at] or what != "dtype"}) > 1:
            return what
    return ""


def difference_causes(job: Job) -> Iterator[Cause]:
    """One for each difference, of groups that stand still and of others."""
    still = {id(stall.group) for stall in job.stalls}
    for view, differences in job_differences(job):
        hard = any(d.what != "label" for d in differences)
        for i, difference in enumerate(differences):
            text = _text(job, difference)
            odd = difference.odd
            ranks = odd.ranks if odd else tuple(r for s in difference.sides for r in s.ranks)
            if not difference.ongoing and id(view) not in still:
                text += "; it has ended on all of them"
                yield Cause(Weight.NOTE, text, ranks, _remedy(job, difference))
            elif i == 0:
                # A later difference of sizes shows that the labels did not differ by chance.
                weight = Weight.DIFFERENT_CALLS if hard else Weight.DIFFERENT_LABELS
                yield Cause(weight, text, ranks, _remedy(job, difference))
            else:
                yield Cause(Weight.LATE_BEHIND_OTHERS, text, ranks)


def _text(job: Job, difference: Difference) -> str:
    group = f"group '{difference.group.name}'"
    number, odd = f"#{difference.sequence} of {group}", difference.odd
    who, other, plural = "the ranks call", "different", "s"
    if odd is not None:
        who = f"{job.named(odd.ranks)} {verb(odd.ranks, 'calls', 'call')}"
        other, plural = "another", ""
    if difference.what == "operation":
        text = f"{who} {other} operation{plural} as {number}"
    elif difference.what == "label":
        text = f"{who} the operations of {group} in another order from #{difference.sequence} on"
    else:
        name = difference.sides[0].operation.operation
        text = f"{who} {name} {number} with {other} {difference.what}{plural}"
    text += f": {'; '.join(difference.rows)}{_moved(difference)}"
    return f"{text}. {ALIKE}" if difference.of_zero3 else text


def _moved(difference: Difference) -> str:
    """A sentence if the calls of one side are those of the other, moved by one; else ""."""
    odd = difference.odd
    if odd is None:
        return ""
    most, at = difference.sides[0], difference.sequence
    rings = difference.group.rings
    few, many = rings[odd.ranks[0]], rings[most.ranks[0]]
    left_out, extra = _alike(few, many, at), _alike(many, few, at)
    if bool(left_out) == bool(extra):
        return ""
    who = f"{rank_list(odd.ranks).capitalize()} {verb(odd.ranks, 'has', 'have')}"
    what, own, theirs = f"left out {most.text}", at, at + 1
    if extra:
        what, own, theirs = f"called {odd.text} once more", at + 1, at
    return (
        f". {who} {what}: its calls from #{own} on are those of {rank_list(most.ranks)} from "
        f"#{theirs} on ({left_out or extra} compared)"
    )


def _alike(behind: dict[int, Operation], ahead: dict[int, Operation], at: int) -> int:
    """How many calls of one ring, from ``at`` on, are those of the other one call later."""
    compared = 0
    while at + compared in behind and at + 1 + compared in ahead:
        a, b = behind[at + compared], ahead[at + 1 + compared]
        if (a.operation, _bytes(a), a.label) != (b.operation, _bytes(b), b.label):
            return 0
        compared += 1
    return compared


def _remedy(job: Job, difference: Difference) -> str:
    if threads := two_threads(job):
        return threads
    if difference.of_zero3:
        return remedy(job, difference.group.members)
    if difference.what in ("size", "dtype"):
        return "give the tensors of this call the same shape and dtype on all ranks"
    return "call the operations of a group in the same order on all ranks"


def blocked_elsewhere(job: Job, rank: int, stall: Stall) -> bool:
    """If the rank stands in an operation of another group that lacks ranks."""
    return any(
        other is not stall and (other.late or other.absent) and _blocked(job, rank, other)
        for other in job.stalls
    )


def _blocked(job: Job, rank: int, stall: Stall) -> bool:
    """If the rank stands in the operation of the stall, so that it can't call another one."""
    operation = job.waits_in(rank)
    if operation is None or rank not in stall.waiting:
        return False
    same = (operation.group, operation.sequence) == (stall.group.name, stall.operation.sequence)
    return same and (operation.waited_for or job.place(rank).doing in _WAITS)


def crossed_causes(job: Job) -> Iterator[Cause]:
    """One for each ring of groups, each of which waits for ranks that wait in the next one."""
    for ring in _rings(job):
        names = [f"'{stall.group.name}'" for stall, _, _ in ring]
        yield Cause(
            Weight.CROSSED_GROUPS,
            f"{rank_list(ranks[0] for _, ranks, _ in ring)} use the groups {', '.join(names[:-1])} "
            f"and {names[-1]} in another order: {'; '.join(_part(job, *hold) for hold in ring)}",
            tuple(sorted({rank for _, ranks, _ in ring for rank in ranks})),
            "call the operations of these groups in the same order on all ranks, or make the calls "
            "asynchronous (async_op=True) and wait after both",
        )


def _part(job: Job, stall: Stall, ranks: list[int], missed: Stall) -> str:
    where = job.place(ranks[0]).where
    return (
        f"{job.named(ranks)} {verb(ranks, 'waits', 'wait')} in {named(stall.operation)}"
        f"{f' {where}' if where else ''} and {verb(ranks, 'has', 'have')} not called "
        f"{numbered(missed.operation)}"
    )


def _rings(job: Job) -> list[list[_Hold]]:
    """Stalls whose ranks are late for the next one's, round and round; no group is in two rings."""
    holds: dict[tuple[int, int], list[int]] = {}
    for at, stall in enumerate(job.stalls):
        for rank in stall.waiting if stall.late else ():
            if _blocked(job, rank, stall):
                for to, other in enumerate(job.stalls):
                    if rank in other.late_set:
                        holds.setdefault((at, to), []).append(rank)
    found: list[list[_Hold]] = []
    while len(found) < _MOST_CYCLES:
        before: dict[int, list[int]] = {}
        for at, to in holds:
            before.setdefault(to, []).append(at)
        try:
            TopologicalSorter(before).prepare()
            break
        except CycleError as error:
            ring = error.args[1][:-1]
        first = ring.index(min(ring))
        ring = ring[first:] + ring[:first]
        pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
        found.append([(job.stalls[at], holds[at, to], job.stalls[to]) for at, to in pairs])
        holds = {pair: ranks for pair, ranks in holds.items() if not {*pair} & {*ring}}
    return found
