"""Why a job hangs: the causes that the dumps of its ranks show, the most likely first."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_smddp.diagnostics.report import crossed, differences, failures, lateness
from deepspeed_smddp.diagnostics.report.cause import Cause, Weight
from deepspeed_smddp.diagnostics.report.failures import waiters
from deepspeed_smddp.diagnostics.report.job import Job
from deepspeed_smddp.diagnostics.report.wording import rank_list


def causes(job: Job, unreached: str = "") -> list[Cause]:
    """All causes that the dumps show, by weight; at least one, which may be that nothing is wrong.

    ``unreached`` says why ranks without a dump could not be asked for one; "" if they could.
    """
    found = [
        *failures.errors(job),
        *failures.absent(job, unreached),
        *differences.causes(job),
        *crossed.causes(job),
        *lateness.late(job),
        *lateness.transfers(job),
    ]
    if any(cause.weight is Weight.MISMATCH_ERROR for cause in found):
        found = [_raised(cause) for cause in found]
    if all(cause.weight >= Weight.NOTE for cause in found):
        found.append(_nothing(job))
    return sorted(found, key=lambda cause: _order(cause))


def _raised(cause: Cause) -> Cause:
    # The records of all ranks tell more of a mismatch than the error, which names two of them.
    if cause.weight is not Weight.DIFFERENT_CALLS:
        return cause
    return replace(cause, weight=Weight.DIFFERENT_CALLS_RAISED)


def _order(cause: Cause) -> tuple[int, int]:
    # Notes stand behind the sentence that nothing is wrong: it is the answer.
    weight = Weight.LATER_ERROR if cause.weight is Weight.HEALTHY else cause.weight
    return weight, cause.ranks[0] if cause.ranks else 0


def _nothing(job: Job) -> Cause:
    if not job.dumps:
        return Cause(Weight.HEALTHY, "no rank left a dump, and none is known to be gone")
    who = rank_list(job.dumps)
    if len(job.dumps) == job.ranks:
        who = f"all {job.ranks} ranks" if job.ranks > 1 else "the only rank"
    if not job.stalls:
        wait = "waits" if len(job.dumps) == 1 else "wait"
        return Cause(
            Weight.HEALTHY,
            f"{who} {wait} in nothing: no operation of any group is unfinished. The table says "
            "where each is",
        )
    return Cause(
        Weight.HEALTHY,
        f"the dumps show no hang: operations are under way, and no rank has waited for longer than "
        f"{lateness.STILL_SECONDS:g} s; {waiters(job, job.stalls[0])}",
    )
