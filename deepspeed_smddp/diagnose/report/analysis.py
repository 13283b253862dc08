"""Why a job hangs: the causes that the dumps of its ranks show, the most likely first."""

from __future__ import annotations

from deepspeed_smddp.diagnose.report import crossed, differences, failures, lateness
from deepspeed_smddp.diagnose.report.cause import Cause, Weight
from deepspeed_smddp.diagnose.report.failures import waiters
from deepspeed_smddp.diagnose.report.job import Job
from deepspeed_smddp.diagnose.report.wording import rank_list

DUMP_SECONDS = 10.0


def causes(job: Job, within: float = DUMP_SECONDS) -> list[Cause]:
    """All causes that the dumps show, by weight; at least one, which may be that nothing is wrong.

    ``within`` is how many seconds ranks had for their dumps.
    """
    found = [
        *failures.errors(job),
        *failures.absent(job, within),
        *differences.causes(job),
        *crossed.causes(job),
        *lateness.late(job),
        *lateness.transfers(job),
    ]
    if all(cause.weight >= Weight.NOTE for cause in found):
        found.append(_nothing(job))
    return sorted(found, key=lambda cause: _order(cause))


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
