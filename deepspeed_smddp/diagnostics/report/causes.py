"""Why a job hangs: the causes that the dumps of its ranks show, the most likely first."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from deepspeed_smddp.diagnostics.report import DUMP_SECONDS, differences
from deepspeed_smddp.diagnostics.report.job import Cause, Job, Stall, Weight
from deepspeed_smddp.diagnostics.report.stack import Doing
from deepspeed_smddp.diagnostics.report.wording import (
    count,
    counterpart,
    cut,
    named,
    rank_list,
    seconds,
    size,
    span,
    verb,
)

# Operations that have been under way for a shorter time are taken to be going on.
STILL_SECONDS = 5.0
_MOST_ERROR = 400
_MOST_PLACES = 3
_MISMATCH = re.compile(
    r"\bcalled .+ while .+ called |not part of this operation|mismatch|"
    r" bytes(?: of \w+)? to rank .+, which takes ",
    re.S,
)
_OF_ANOTHER = re.compile(
    r"\bis lost\b|\bended\b|time[d -]*out|deadline|not done within|was lost before|"
    r"\bgave up\b|\babort(ed)?\b",
    re.I,
)
_SILENT = re.compile(r"not answered|silent|stopped|not seen to end", re.I)
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


def causes(job: Job, unreached: str = "") -> list[Cause]:
    """All causes that the dumps show, by weight; at least one, which may be that nothing is wrong.

    ``unreached`` says why ranks without a dump could not be asked for one; "" if they could.
    """
    found = [
        *_errors(job),
        *_absent(job, unreached),
        *differences.difference_causes(job),
        *differences.crossed_causes(job),
        *_late(job),
        *_transfers(job),
    ]
    if all(cause.weight >= Weight.NOTE for cause in found):
        found.append(Cause(Weight.HEALTHY, _nothing(job)))
    is_mismatch = any(cause.weight is Weight.MISMATCH_ERROR for cause in found)

    def order(cause: Cause) -> tuple[bool, Weight, tuple[int, ...]]:
        # The records of all ranks tell more of a mismatch than the error, which names two of them.
        is_first = is_mismatch and cause.weight is Weight.DIFFERENT_CALLS
        return not is_first, cause.weight, cause.ranks[:1]

    return sorted(found, key=order)


def _nothing(job: Job) -> str:
    if not job.dumps:
        return "no rank left a dump, and none is known to be gone"
    if job.stalls:
        return (
            "the dumps show no hang: operations are under way, and no rank has waited for longer "
            f"than {STILL_SECONDS:g} s; {_waiters(job, job.stalls[0])}"
        )
    who = rank_list(job.dumps)
    if len(job.dumps) == job.ranks:
        who = f"all {job.ranks} ranks" if job.ranks > 1 else "the only rank"
    return (
        f"{who} {verb(list(job.dumps), 'waits', 'wait')} in nothing: no operation of any group is "
        "unfinished. The table says where each is"
    )


def _errors(job: Job) -> Iterator[Cause]:
    """The errors that ranks have raised: those that tell the cause, and those that follow it."""
    raised: dict[str, list[int]] = defaultdict(list)
    for rank, dump in job.dumps.items():
        texts = [dump.error] if dump.error else [g.error for g in dump.groups if g.error]
        for text in dict.fromkeys(" ".join(t.split()) for t in texts):
            raised[text].append(rank)
    own = [t for t in raised if not _MISMATCH.search(t) and not _OF_ANOTHER.search(t)]
    # Among several errors, the dump that was made first is the best guess.
    first = min(own, key=lambda t: min(job.dumps[r].time for r in raised[t]), default=None)
    for text, ranks in raised.items():
        shown, who = cut(text, _MOST_ERROR), job.named(ranks)
        if _MISMATCH.search(text):
            yield Cause(
                Weight.MISMATCH_ERROR,
                f"{who} raised that ranks call different operations: {shown}",
                tuple(ranks),
                differences.two_threads(job)
                or "call the same operation with the same sizes on all ranks",
            )
        elif text == first:
            order = "" if len(raised) == 1 else " first, by the times of the dumps"
            order += " and the hosts' clocks" if order and job.several_hosts else ""
            yield Cause(
                Weight.OWN_ERROR,
                f"{who} raised an error{order}: {shown}",
                tuple(ranks),
                f"read the error of {rank_list(ranks)}; the other ranks wait for it",
            )
        else:
            yield Cause(Weight.LATER_ERROR, f"{who} raised: {shown}", tuple(ranks))


def _absent(job: Job, unreached: str) -> Iterator[Cause]:
    """Ranks that are known to be gone or silent, and ranks that left no dump in time."""
    known: dict[str, list[int]] = defaultdict(list)
    for rank, text in job.gone.items():
        known[text].append(rank)
    for text, ranks in known.items():
        silent, who = _SILENT.search(text), rank_list(ranks)
        if silent:
            advice = (
                f"look at the host of {who}: whether it is up and reached by the others, and "
                "whether the process is stopped (`ps -o stat,wchan PID`: T)"
            )
        elif ", after a failure: " in text:
            advice = f"read the error of {who} in its log"
        elif "in flight" in text:
            advice = f"call wait() on all operations of {who} before its program ends"
        elif "ended its program" in text:
            advice = (
                f"compare how many batches {who} and the others have (uneven batches?), unless the "
                f"log of {who} says why it has ended"
            )
        else:
            advice = (
                f"read the last lines of the log of {who}, and the kernel's log of the host (a "
                "process that took too much memory is named there); a rank that ended without an "
                "error had fewer batches than the others"
            )
        shown = cut(text, _MOST_ERROR).rstrip(".")
        if not shown.lower().startswith("rank"):
            state = "silent" if silent else "gone"
            who = f"{job.named(ranks)} {verb(ranks, 'is', 'are')}"
            shown = f"{who} {state}: {shown or 'no more is known'}"
        yield Cause(Weight.GONE, shown + _waiting(job, ranks), tuple(ranks), advice)
    missing = job.missing
    if missing and unreached:
        yield Cause(Weight.NOTE, f"{job.named(missing)} {unreached}", tuple(missing))
    elif missing:
        waited = _waiting(job, missing)
        yield Cause(
            Weight.NO_DUMP if waited or not job.dumps else Weight.NOTE,
            f"{job.named(missing)} left no dump within {DUMP_SECONDS:g} s: "
            f"{verb(missing, 'it is', 'each is')} stopped, or its interpreter does not run "
            f"(something holds the GIL){waited}",
            tuple(missing),
            f"look at {rank_list(missing)} with `py-spy dump --native --pid PID`, and at its "
            "state with `ps -o stat,wchan PID` (T: stopped, D: in the kernel)",
        )


def _waiting(job: Job, ranks: list[int]) -> str:
    wanted = set(ranks)
    stall = next((s for s in job.stalls if wanted & {*s.absent, *s.late}), None)
    return f"; {_waiters(job, stall)}" if stall is not None else ""


def _waiters(job: Job, stall: Stall) -> str:
    """``ranks 0-2 wait in all_gather #12 of group 'default' (4 MiB), for 35 s``."""
    return f"{job.waiting(stall)} in {named(stall.operation)}{_waited(job, stall)}"


def _waited(job: Job, stall: Stall) -> str:
    """``, for 35 s``: how long the ranks of a stall have been in it; "" if that is not known."""
    times = job.ages(stall)
    text = span(times) or (seconds(times[0]) if times else "")
    return f", for {text}" if text else ""


def _late(job: Job) -> Iterator[Cause]:
    """One for each group in which ranks wait for members that have not called the operation."""
    for stall in job.stalls:
        if not stall.late:
            continue
        free = tuple(r for r in stall.late if not differences.blocked_elsewhere(job, r, stall))
        waited = f"{_waiters(job, stall)}, which {_have_not_called(stall.late)}"
        if stall.operation.is_message:
            waited += " from its side"
        times = job.ages(stall)
        if times and max(times) < STILL_SECONDS and not stall.group.broken:
            yield Cause(Weight.NOTE, f"{waited} yet", stall.late)
        elif free:
            yield _late_cause(job, stall, free)
        else:
            waited += f": {verb(stall.late, 'it waits', 'they wait')} in another group"
            yield Cause(Weight.LATE_BEHIND_OTHERS, waited, stall.late)


def _late_cause(job: Job, stall: Stall, free: tuple[int, ...]) -> Cause:
    telling = next((r for r in free if job.place(r).doing in _TELLING), None)
    label, few = differences.label(job, stall), len(stall.waiting) < len(free)
    waited = _waited(job, stall)
    if not label or (telling is not None and not few):
        text = (
            f"{_places(job, free)}, and {verb(free, 'has', 'have')} not called "
            f"{counterpart(stall.operation)}{named(stall.operation)}, "
            f"in which {job.waiting(stall)}{waited}"
        )
        advice = ""
        if telling is not None:
            advice = _TELLING[job.place(telling).doing].format(ranks=rank_list(free))
        return Cause(Weight.LATE, f"{text}. {_behind(job, stall, free)}", free, advice)
    plain = named(replace(stall.operation, label=""))
    if few:
        text = (
            f"only {job.named(stall.waiting)} {verb(stall.waiting, 'runs', 'run')} {label}: "
            f"{verb(stall.waiting, 'it waits', 'they wait')} in {plain}{waited}, which "
            f"{_have_not_called(free)}: {_places(job, free)}"
        )
    else:
        text = (
            f"{job.named(free)} {verb(free, 'does', 'do')} not run {label}, for which "
            f"{job.waiting(stall)} in {plain}{waited}: {_places(job, free)}"
        )
    text += f". {differences.ALIKE}. {_behind(job, stall, free)}"
    suspects = stall.waiting if few else free
    return Cause(Weight.LATE, text, suspects, differences.remedy(job, stall.group.members))


def _have_not_called(ranks: Sequence[int]) -> str:
    return f"{rank_list(ranks)} {verb(ranks, 'has', 'have')} not called"


def _places(job: Job, ranks: tuple[int, ...]) -> str:
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
    text = f"{verb(ranks, 'It is', 'They are')} {calls} behind in this group"
    idle = span([t for r in ranks if (t := job.idle(r)) is not None])
    last = verb(ranks, "its last call of any was", "their last calls of any were")
    return f"{text}; {last} {idle} ago" if idle else text


def _transfers(job: Job) -> Iterator[Cause]:
    """Operations that all members have called, and that have not ended for a while."""
    for stall in job.stalls:
        if stall.late or stall.absent:
            continue
        missing = missing_bytes(stall)
        known = [since for _, _, _, since in missing.values()] or job.ages(stall)
        if max(known, default=0.0) < STILL_SECONDS and not stall.group.broken:
            continue
        if not missing:
            path = f" (path: {stall.operation.path})" if stall.operation.path else ""
            text = f"{_waiters(job, stall)}, which all members of the group have called{path}"
            yield Cause(Weight.TRANSFER, text, stall.waiting)
            continue
        most = max(len(by) for by, _, _, _ in missing.values())
        sources = tuple(sorted(r for r, (by, _, _, _) in missing.items() if len(by) == most))
        by, expected, arrived, since = missing[sources[0]]
        yield Cause(
            Weight.TRANSFER,
            f"{job.named(sources)} {verb(sources, 'has', 'have')} called {named(stall.operation)} "
            f"as all members of the group have, but {rank_list(by)} {verb(by, 'lacks', 'lack')} "
            f"bytes of {rank_list(sources[:1])}: {size(arrived)} of {size(expected)} have arrived, "
            f"the last {span([since])} ago",
            sources,
            f"look at the network and the load of {job.named(sources)}",
        )


def missing_bytes(stall: Stall) -> dict[int, tuple[tuple[int, ...], int, int, float]]:
    """For each awaited rank: who awaits it, and bytes expected, bytes arrived and seconds.

    The numbers are those of the rank that has waited longest.
    """
    by: dict[int, list[int]] = defaultdict(list)
    worst: dict[int, tuple[float, int, int]] = {}
    for rank in stall.waiting:
        oldest = stall.group.seen[rank].oldest
        for awaited in oldest.awaited if oldest is not None else []:
            if awaited.expected == 0:
                continue  # its call is awaited, not its bytes
            numbers = (awaited.seconds, awaited.expected, awaited.arrived)
            if not by[awaited.rank] or numbers[0] > worst[awaited.rank][0]:
                worst[awaited.rank] = numbers
            by[awaited.rank].append(rank)
    return {rank: (tuple(ranks), *worst[rank][1:], worst[rank][0]) for rank, ranks in by.items()}
