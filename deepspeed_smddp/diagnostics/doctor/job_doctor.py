"""``smddp doctor`` on the ranks of a job: collects, compares, and agrees on one exit status."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.diagnostics.doctor import facts, measurements, rank_facts
from deepspeed_smddp.diagnostics.doctor.facts import Deviation, RankFacts, Verdict
from deepspeed_smddp.diagnostics.doctor.measurements import Measured
from deepspeed_smddp.diagnostics.doctor.rendezvous import Rendezvous

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
    rendezvous: Rendezvous,
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
    nonce = rendezvous.share("nonce", secrets.token_hex(8), seconds)
    if nonce is None:
        return FAILED
    own = rank_facts.collect(rendezvous.rank, ds_config, nonce)
    gathered = rendezvous.gather("facts", own.to_json(), seconds)
    found = [facts.from_json(gathered[rank]) for rank in sorted(gathered)]
    measured = _measure(rendezvous, found, seconds) if measure else None
    status: int | None = None
    if rendezvous.rank == 0:
        report = JobReport(rendezvous.size, found, [*_missing(found, rendezvous.size, seconds)])
        report.deviations += facts.deviations(found)
        if measured is not None:
            report.deviations += measured.deviations(found)
            report.measured = measured
        report.deviations.sort(key=lambda deviation: deviation.verdict is not Verdict.FAILED)
        report.seconds = time.monotonic() - began
        show(report)
        status = report.status
    status = rendezvous.share("status", status, 2 * seconds + 2 * measurements.SECONDS)
    rendezvous.leave()
    return FAILED if status is None else status


def _measure(rendezvous: Rendezvous, found: Sequence[RankFacts], seconds: float) -> Measured | None:
    """What the ranks with facts measure together; None on the other ranks than rank 0."""
    server = measurements.clock_server() if rendezvous.rank == 0 else None
    try:
        contact = "" if server is None else server.contact()
        plan = asdict(measurements.plan(found, contact)) if rendezvous.rank == 0 else None
        plan = rendezvous.share("plan", plan, 2 * seconds + 60)
        part = measurements.run(rendezvous, plan) if plan is not None else None
        who = [rank.rank for rank in measurements.taking_part(found)] if found else []
        parts = rendezvous.gather("measured", part, measurements.SECONDS, who)
    finally:
        if server is not None:
            server.close()
    if rendezvous.rank != 0:
        return None
    return measurements.joined(parts, found, measurements.stored_network(found))


def _missing(found: Sequence[RankFacts], size: int, seconds: float) -> list[Deviation]:
    gone = sorted(set(range(size)) - {rank.rank for rank in found})
    if not gone:
        return []
    text = (
        f"rank{'' if len(gone) == 1 else 's'} {facts.ranges(gone)} did not answer within "
        f"{seconds:.0f} s: see the output of their processes"
    )
    return [Deviation("ranks", text, Verdict.FAILED, tuple(gone))]


WIDTH = 80
STYLES = {Verdict.OK: "green", Verdict.LIMITED: "yellow", Verdict.FAILED: "red"}
# Of what all ranks share, these are shown; the others are counted.
_SHOWN = ("deepspeed-smddp", "torch", "DeepSpeed", "Python", "libfabric", "NICs", "MTU", "GPUs")


def print_report(report: JobReport, console: Console) -> None:
    """Prints what deviates in full, and what all ranks share in one line."""
    console.print(page(report), width=min(WIDTH, console.width), soft_wrap=False)


def page(report: JobReport) -> RenderableType:
    """The page: the hosts, a table of findings, one sentence at the end."""
    hosts: dict[str, list[int]] = {}
    for rank in report.ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    head = Text(f"{report.size} ranks on {len(hosts)} host{'' if len(hosts) == 1 else 's'}: ")
    head.append("; ".join(f"{host} {facts.ranges(who)}" for host, who in hosts.items()))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7)
    table.add_column(width=17, overflow="fold")
    table.add_column(overflow="fold")
    for found in report.deviations:
        verdict = Text(found.verdict.value, STYLES[found.verdict])
        table.add_row(verdict, found.name, Text(found.text))
    if report.ranks:
        equal = facts.same(report.ranks)
        known = {fact.name: fact.value for fact in equal}
        shown = [f"{name} {_short(known[name])}" for name in _SHOWN if name in known]
        rest = len(equal) - len(shown)
        text = "; ".join([*shown, f"{rest} more facts and settings (--json lists them)"])
        table.add_row(Text("ok", STYLES[Verdict.OK]), "on all ranks", Text(text))
    if report.measured is not None:
        text = "; ".join(report.measured.sentences())
        table.add_row(Text("ok", STYLES[Verdict.OK]), "measured", Text(text or "nothing"))
    return Group(head, Text(), table, Text(), _summary(report))


def _short(value: str) -> str:
    """Without an explanation in parentheses."""
    return value.partition(" (")[0]


def _summary(report: JobReport) -> Text:
    failed = sum(found.verdict is Verdict.FAILED for found in report.deviations)
    limited = len(report.deviations) - failed
    if not report.deviations:
        return Text(f"Nothing found in {report.seconds:.1f} s.", STYLES[Verdict.OK])
    style = STYLES[Verdict.FAILED if failed else Verdict.LIMITED]
    counts = f"{failed} failed, {limited} limited"
    return Text(f"{counts}; {report.seconds:.1f} s.", style)
