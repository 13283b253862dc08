"""Groups that ranks use in another order: each waits in one, and has not called the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_smddp.diagnostics.report.cause import Cause, Weight
from deepspeed_smddp.diagnostics.report.job import Job, Stall
from deepspeed_smddp.diagnostics.report.stack import Doing
from deepspeed_smddp.diagnostics.report.wording import named, rank_list, verb

_MOST_CYCLES = 3
# What a thread may stand in while it waits for an operation whose wait is not recorded.
_WAITS = (Doing.COLLECTIVE, Doing.DEVICE, Doing.BACKWARD, Doing.LOCK, Doing.NOTHING)


@dataclass(frozen=True)
class Hold:
    """``ranks`` wait in ``stall``, and are late for the operation of ``next``."""

    stall: Stall
    ranks: tuple[int, ...]
    next: Stall


def blocked(job: Job, rank: int, stall: Stall) -> bool:
    """If the rank stands in the operation of the stall, so that it can't call another one."""
    operation = job.waits_in(rank)
    if operation is None or rank not in stall.waiting:
        return False
    same = (operation.group, operation.sequence) == (stall.group.name, stall.operation.sequence)
    return same and (operation.waited_for or job.place(rank).doing in _WAITS)


def blocked_elsewhere(job: Job, rank: int, stall: Stall) -> bool:
    """If the rank stands in an operation of another group that lacks ranks."""
    return any(
        other is not stall and (other.late or other.absent) and blocked(job, rank, other)
        for other in job.stalls_of(rank)
    )


def causes(job: Job) -> Iterator[Cause]:
    """One for each ring of groups, each of which waits for ranks that wait in the next one."""
    for cycle in cycles(job):
        names = [f"'{hold.stall.group.name}'" for hold in cycle]
        parts = [_part(job, hold) for hold in cycle]
        ranks = tuple(hold.ranks[0] for hold in cycle)
        yield Cause(
            Weight.CROSSED_GROUPS,
            f"{rank_list(ranks)} use the groups {', '.join(names[:-1])} and {names[-1]} in another "
            f"order: {'; '.join(parts)}",
            tuple(sorted({rank for hold in cycle for rank in hold.ranks})),
            "call the operations of these groups in the same order on all ranks, or make the calls "
            "asynchronous (async_op=True) and wait after both",
        )


def _part(job: Job, hold: Hold) -> str:
    place = job.place(hold.ranks[0])
    where = f" at {place.file}:{place.line}" if place.file else ""
    where += f" in {place.function}" if where and place.function not in ("", "<module>") else ""
    operation = hold.next.operation
    return (
        f"{job.named(hold.ranks)} {verb(hold.ranks, 'waits', 'wait')} in "
        f"{named(hold.stall.operation)}{where} and {verb(hold.ranks, 'has', 'have')} not called "
        f"{operation.operation} #{operation.sequence} of group '{operation.group}'"
    )


def cycles(job: Job) -> list[list[Hold]]:
    """Rings of stalls, the shortest first, each group in at most one of them."""
    stalls = [stall for stall in job.stalls if stall.late]
    holds = {id(stall): _holds(job, stall) for stall in stalls}
    found: list[list[Hold]] = []
    used: set[int] = set()
    for stall in stalls:
        if len(found) >= _MOST_CYCLES:
            break
        cycle = None if id(stall) in used else _shortest(stall, holds)
        if cycle and not used & {id(hold.stall) for hold in cycle}:
            used |= {id(hold.stall) for hold in cycle}
            found.append(cycle)
    return sorted(found, key=len)


def _holds(job: Job, stall: Stall) -> list[Hold]:
    """The stalls that ranks which wait in this one keep up."""
    keeps: dict[int, tuple[Stall, list[int]]] = {}
    for rank in stall.waiting:
        if not blocked(job, rank, stall):
            continue
        for other in job.stalls_of(rank):
            if other is not stall and rank in other.late_set:
                keeps.setdefault(id(other), (other, []))[1].append(rank)
    return [Hold(stall, tuple(ranks), other) for other, ranks in keeps.values()]


def _shortest(start: Stall, holds: dict[int, list[Hold]]) -> list[Hold] | None:
    """The shortest way from a stall back to it, breadth first."""
    ways: list[list[Hold]] = [[hold] for hold in holds[id(start)]]
    seen: set[int] = set()
    while ways:
        way = ways.pop(0)
        at = way[-1].next
        if at is start:
            return way
        if id(at) in seen:
            continue
        seen.add(id(at))
        ways += [[*way, hold] for hold in holds.get(id(at), [])]
    return None
