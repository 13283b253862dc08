"""``smddp doctor`` on the ranks of a job: collects, compares, and agrees on one exit status."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_smddp.diagnostics.doctor import clock_check, deviations, measurements, rank_facts
from deepspeed_smddp.diagnostics.doctor.deviations import Deviation
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.measurements import Measured
from deepspeed_smddp.diagnostics.doctor.meeting import Meeting
from deepspeed_smddp.diagnostics.doctor.rank_facts import RankFacts

# Exit statuses: all is well; something will fail; ranks differ or something is slow.
WELL, FAILED, LIMITED = 0, 1, 3


@dataclass
class JobReport:
    """The result of a run over all ranks."""

    size: int
    ranks: list[RankFacts] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    measured: Measured | None = None
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """The exit status of all ranks."""
        verdicts = {deviation.verdict for deviation in self.deviations}
        if Verdict.FAILED in verdicts:
            return FAILED
        return LIMITED if Verdict.LIMITED in verdicts else WELL

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "size": self.size,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "deviations": [
                {
                    "name": found.name,
                    "verdict": found.verdict.value,
                    "ranks": list(found.ranks),
                    "text": found.text,
                }
                for found in self.deviations
            ],
            "measured": None if self.measured is None else self.measured.to_json(),
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def run(
    meeting: Meeting,
    ds_config: Path | None,
    seconds: float,
    show: Callable[[JobReport], None],
    measure: bool = True,
) -> int:
    """The exit status, the same on all ranks.

    Args:
        seconds: how long rank 0 waits for the facts of all ranks.
        show: called on rank 0 with the report, while the other ranks still run: torchrun ends all
            ranks as soon as one has exited with a status other than 0.
        measure: whether links, cores and clocks are measured.
    """
    began = time.monotonic()
    nonce = meeting.share("nonce", secrets.token_hex(8), seconds)
    if nonce is None:
        return FAILED
    own = rank_facts.collect(meeting.rank, ds_config, nonce)
    gathered = meeting.gather("facts", own.to_json(), seconds)
    found = [rank_facts.from_json(gathered[rank]) for rank in sorted(gathered)]
    measured = _measure(meeting, found, seconds) if measure else None
    status: int | None = None
    if meeting.rank == 0:
        report = JobReport(meeting.size, found, [*_missing(found, meeting.size, seconds)])
        report.deviations += deviations.deviations(found)
        if measured is not None:
            report.deviations += measured.deviations(found)
            report.measured = measured
        report.deviations.sort(key=lambda deviation: deviation.verdict is not Verdict.FAILED)
        report.seconds = time.monotonic() - began
        show(report)
        status = report.status
    status = meeting.share("status", status, 2 * seconds + 2 * measurements.SECONDS)
    meeting.leave()
    return FAILED if status is None else status


def _measure(meeting: Meeting, found: Sequence[RankFacts], seconds: float) -> Measured | None:
    """What the ranks with facts measure together; None on the other ranks than rank 0."""
    server = clock_check.server() if meeting.rank == 0 else None
    try:
        contact = "" if server is None else server.contact()
        plan = asdict(measurements.plan(found, contact)) if meeting.rank == 0 else None
        plan = meeting.share("plan", plan, 2 * seconds + 60)
        part = measurements.run(meeting, plan) if plan is not None else None
        who = [rank.rank for rank in measurements.taking_part(found)] if found else []
        parts = meeting.gather("measured", part, measurements.SECONDS, who)
    finally:
        if server is not None:
            server.close()
    if meeting.rank != 0:
        return None
    return measurements.joined(parts, found, measurements.stored_network(found))


def _missing(found: Sequence[RankFacts], size: int, seconds: float) -> list[Deviation]:
    gone = sorted(set(range(size)) - {rank.rank for rank in found})
    if not gone:
        return []
    text = (
        f"rank{'' if len(gone) == 1 else 's'} {deviations.ranges(gone)} did not answer within "
        f"{seconds:.0f} s: see the output of their processes"
    )
    return [Deviation("ranks", text, Verdict.FAILED, tuple(gone))]
