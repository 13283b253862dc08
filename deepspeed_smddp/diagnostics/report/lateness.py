"""Ranks that have not called what others wait in, and bytes that do not arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from deepspeed_smddp.diagnostics.report import zero3
from deepspeed_smddp.diagnostics.report.cause import Cause, Weight
from deepspeed_smddp.diagnostics.report.crossed import blocked_elsewhere
from deepspeed_smddp.diagnostics.report.failures import waited, waiters
from deepspeed_smddp.diagnostics.report.job import Job, Stall
from deepspeed_smddp.diagnostics.report.stack import Doing
from deepspeed_smddp.diagnostics.report.wording import count, named, rank_list, size, span, verb

# Operations that have been under way for a shorter time are taken to be going on.
STILL_SECONDS = 5.0
_MOST_PLACES = 3
# A rank that stands in one of these is late because of it, whatever the others wait for.
_TELLING = {
    Doing.DEBUGGER: "continue the debugger, or take the breakpoint out",
    Doing.SAVE: "save on all ranks at once, or give operations a timeout that a save fits in",
    Doing.LOAD: "load on all ranks at once, or give operations a timeout that a load fits in",
    Doing.DATA: "look at the data loader of {ranks}: its workers, its storage, and whether it has "
    "as many batches as the others have",
    Doing.SUBPROCESS: "look at the child process that {ranks} started",
    Doing.SLEEP: "take the sleep out, or let all ranks sleep",
    Doing.INPUT: "take the call of input() out: a rank has no terminal",
    Doing.CHECKPOINT: "call save_checkpoint on all ranks: it holds collectives",
}


def late(job: Job) -> Iterator[Cause]:
    """One for each group in which ranks wait for members that have not called the operation."""
    for stall in job.stalls:
        if not stall.late:
            continue
        free = tuple(r for r in stall.late if not blocked_elsewhere(job, r, stall))
        times = [t for r in stall.waiting if (t := _age(job, stall, r)) is not None]
        if times and max(times) < STILL_SECONDS and not stall.group.broken:
            text = f"{waiters(job, stall)}, which {_have(stall.late)} not called yet"
            yield Cause(Weight.NOTE, text, stall.late)
        elif free:
            yield _late(job, stall, free)
        else:
            text = f"{waiters(job, stall)}, which {_have(stall.late)} not called: "
            text += f"{verb(stall.late, 'it waits', 'they wait')} in another group"
            yield Cause(Weight.LATE_BEHIND_OTHERS, text, stall.late)


def _late(job: Job, stall: Stall, free: tuple[int, ...]) -> Cause:
    telling = next((r for r in free if job.place(r).doing in _TELLING), None)
    label, few = zero3.label(job, stall), len(stall.waiting) < len(free)
    if not label or (telling is not None and not few):
        text = (
            f"{places(job, free)}, and {verb(free, 'has', 'have')} not called "
            f"{named(stall.operation)}, in which {job.named(stall.waiting)} "
            f"{verb(stall.waiting, 'waits', 'wait')}{waited(job, stall)}"
        )
        advice = ""
        if telling is not None:
            advice = _TELLING[job.place(telling).doing].format(ranks=rank_list(free))
        return Cause(Weight.LATE, f"{text}. {_behind(job, stall, free)}", free, advice)
    if few:
        text = (
            f"only {job.named(stall.waiting)} {verb(stall.waiting, 'runs', 'run')} {label}: "
            f"{verb(stall.waiting, 'it waits', 'they wait')} in {_plain(stall)}"
            f"{waited(job, stall)}, which {_have(free)} not called: {places(job, free)}"
        )
    else:
        text = (
            f"{job.named(free)} {verb(free, 'does', 'do')} not run {label}, for which "
            f"{job.named(stall.waiting)} {verb(stall.waiting, 'waits', 'wait')} in "
            f"{_plain(stall)}{waited(job, stall)}: {places(job, free)}"
        )
    text += f". {zero3.ALIKE}. {_behind(job, stall, free)}"
    suspects = stall.waiting if few else free
    return Cause(Weight.LATE, text, suspects, zero3.remedy(job, stall.group.members))


def _have(ranks: tuple[int, ...]) -> str:
    return f"{rank_list(ranks)} {verb(ranks, 'has', 'have')}"


def _plain(stall: Stall) -> str:
    operation = stall.operation
    shown = f"{operation.operation} #{operation.sequence} of group '{operation.group}'"
    return f"{shown} ({size(operation.bytes)})" if operation.bytes > 0 else shown


def places(job: Job, ranks: tuple[int, ...]) -> str:
    """``rank 3 (host-b) is in torch.save, called at train.py:88 in save``, by unlike places."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_place[job.place(rank).sentence].append(rank)
    rows = sorted(by_place.items(), key=lambda item: (-len(item[1]), item[1][0]))
    parts = [f"{job.named(at)} {verb(at, 'is', 'are')} {what}" for what, at in rows[:_MOST_PLACES]]
    rest = sum(len(at) for _, at in rows[_MOST_PLACES:])
    if rest:
        parts.append(f"{count(rest, 'other rank')} elsewhere")
    return "; ".join(parts)


def _behind(job: Job, stall: Stall, ranks: tuple[int, ...]) -> str:
    """``It is 1 call behind in this group; its last call of any was 36 s ago``."""
    most = max(stall.group.submitted(r) for r in stall.waiting)
    low, high = (f(most - stall.group.submitted(r) for r in ranks) for f in (min, max))
    calls = count(low, "call") if low == high else f"{low} to {count(high, 'call')}"
    one = len(ranks) == 1
    text = f"{'It is' if one else 'They are'} {calls} behind in this group"
    idle = span([t for r in ranks if (t := job.idle(r)) is not None])
    if not idle:
        return text
    last = "its last call of any was" if one else "their last calls of any were"
    return f"{text}; {last} {idle} ago"


def transfers(job: Job) -> Iterator[Cause]:
    """Operations that all members have called, and that have not ended for a while."""
    for stall in job.stalls:
        if stall.late or stall.absent:
            continue
        missing = missing_bytes(stall)
        known = [seconds for _, _, _, seconds in missing.values()]
        times = [t for r in stall.waiting if (t := _age(job, stall, r)) is not None]
        if max(known or times, default=0.0) < STILL_SECONDS and not stall.group.broken:
            continue
        operation = named(stall.operation)
        if not missing:
            path = stall.operation.path
            way = f" (path: {path})" if path else ""
            yield Cause(
                Weight.TRANSFER,
                f"{job.named(stall.waiting)} {verb(stall.waiting, 'waits', 'wait')} in {operation}"
                f"{waited(job, stall)}, which all members of the group have called{way}",
                stall.waiting,
            )
            continue
        most = max(len(by) for by, _, _, _ in missing.values())
        sources = tuple(sorted(r for r, (by, _, _, _) in missing.items() if len(by) == most))
        by, expected, arrived, seconds = missing[sources[0]]
        yield Cause(
            Weight.TRANSFER,
            f"{job.named(sources)} {verb(sources, 'has', 'have')} called {operation} as all "
            f"members of the group have, but {rank_list(by)} {verb(by, 'lacks', 'lack')} bytes of "
            f"{rank_list(sources[:1])}: {size(arrived)} of {size(expected)} have arrived, the last "
            f"{span([seconds])} ago",
            sources,
            f"look at the network and the load of {job.named(sources)}",
        )


def _age(job: Job, stall: Stall, rank: int) -> float | None:
    operation = stall.group.pending(rank)
    return job.waited(rank, operation) if operation is not None else None


def missing_bytes(stall: Stall) -> dict[int, tuple[tuple[int, ...], int, int, float]]:
    """For each awaited rank: who awaits it, and bytes expected, bytes arrived and seconds.

    The numbers are those of the rank that has waited longest.
    """
    by: dict[int, list[int]] = defaultdict(list)
    worst: dict[int, tuple[int, int, float]] = {}
    for rank in stall.waiting:
        group = stall.group.seen[rank]
        for awaited in group.oldest.awaited if group.oldest is not None else []:
            if awaited.expected == 0:
                continue  # its call is awaited, not its bytes
            by[awaited.rank].append(rank)
            numbers = (awaited.expected, awaited.arrived, awaited.seconds)
            if awaited.rank not in worst or awaited.seconds > worst[awaited.rank][2]:
                worst[awaited.rank] = numbers
    return {rank: (tuple(ranks), *worst[rank]) for rank, ranks in by.items()}
