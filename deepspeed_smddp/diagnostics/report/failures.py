"""Causes that ranks name themselves, and ranks that say nothing: errors, gone ranks, no dump."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from deepspeed_smddp.diagnostics.report.cause import Cause, Weight
from deepspeed_smddp.diagnostics.report.dump_terms import DUMP_SECONDS
from deepspeed_smddp.diagnostics.report.job import Job, Stall
from deepspeed_smddp.diagnostics.report.wording import cut, named, rank_list, seconds, span, verb

_MOST_ERROR = 400
_MISMATCH = re.compile(r"\bcalled .+ while .+ called |not part of this operation|mismatch", re.S)
_OF_ANOTHER = re.compile(
    r"\bis lost\b|\bended during\b|time[d -]*out|deadline|not (done|finish) within|was lost before|"
    r"\bgave up\b|\babort(ed)?\b",
    re.I,
)
_SILENT = re.compile(r"not answered|silent|stopped|not seen to end", re.I)


def errors(job: Job) -> Iterator[Cause]:
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
        shown = cut(text, _MOST_ERROR)
        if _MISMATCH.search(text):
            yield Cause(
                Weight.MISMATCH_ERROR,
                f"{job.named(ranks)} raised that ranks call different operations: {shown}",
                tuple(ranks),
                "call the same operation with the same sizes on all ranks",
            )
        elif text == first:
            order = "" if len(raised) == 1 else " first, by the times of the dumps"
            clocks = " and the hosts' clocks" if order and job.several_hosts else ""
            yield Cause(
                Weight.OWN_ERROR,
                f"{job.named(ranks)} raised an error{order}{clocks}: {shown}",
                tuple(ranks),
                f"read the error of {rank_list(ranks)}; the other ranks wait for it",
            )
        else:
            yield Cause(Weight.LATER_ERROR, f"{job.named(ranks)} raised: {shown}", tuple(ranks))


def absent(job: Job, unreached: str) -> Iterator[Cause]:
    """Ranks that are known to be gone or silent, and ranks that left no dump in time."""
    known: dict[str, list[int]] = defaultdict(list)
    for rank, text in job.gone.items():
        known[text].append(rank)
    for text, ranks in known.items():
        advice = (
            f"read the last lines of the log of {rank_list(ranks)}, and the kernel's log of the "
            "host (a process that took too much memory is named there)"
        )
        if _SILENT.search(text):
            advice = (
                f"look at the host of {rank_list(ranks)}: whether it is up and reached by the "
                "others, and whether the process is stopped (`ps -o stat,wchan PID`: T)"
            )
        cause = _gone(job, ranks, text) + _waiting(job, ranks)
        yield Cause(Weight.GONE, cause, tuple(ranks), advice)
    if job.missing and unreached:
        yield Cause(Weight.NOTE, f"{job.named(job.missing)} {unreached}", tuple(job.missing))
    elif job.missing:
        waited = _waiting(job, job.missing)
        yield Cause(
            Weight.NO_DUMP if waited or not job.dumps else Weight.NOTE,
            f"{job.named(job.missing)} left no dump within {DUMP_SECONDS:g} s: "
            f"{verb(job.missing, 'it is', 'each is')} stopped, or its interpreter does not run "
            f"(something holds the GIL){waited}",
            tuple(job.missing),
            f"look at {rank_list(job.missing)} with `py-spy dump --native --pid PID`, and at its "
            "state with `ps -o stat,wchan PID` (T: stopped, D: in the kernel)",
        )


def _gone(job: Job, ranks: list[int], text: str) -> str:
    text = cut(text, _MOST_ERROR).rstrip(".")
    if text.lower().startswith("rank"):
        return text
    state = "silent" if _SILENT.search(text) else "gone"
    return f"{job.named(ranks)} {verb(ranks, 'is', 'are')} {state}: {text or 'no more is known'}"


def _waiting(job: Job, ranks: list[int]) -> str:
    wanted = set(ranks)
    stall = next((s for s in job.stalls if wanted & {*s.absent, *s.late}), None)
    return f"; {waiters(job, stall)}" if stall is not None else ""


def waiters(job: Job, stall: Stall) -> str:
    """``ranks 0-2 wait in all_gather #12 of group 'default' (4 MiB), for 35 s``."""
    return (
        f"{job.named(stall.waiting)} {verb(stall.waiting, 'waits', 'wait')} in "
        f"{named(stall.operation)}{waited(job, stall)}"
    )


def waited(job: Job, stall: Stall) -> str:
    """``, for 35 s``: how long the ranks of a stall have been in it; "" if that is not known."""
    times = []
    for rank in stall.waiting:
        operation = stall.group.pending(rank)
        value = job.waited(rank, operation) if operation is not None else None
        if value is not None:
            times.append(value)
    text = span(times)
    if not text:
        return f", for {seconds(times[0])}" if times else ""
    return f", for {text}"
