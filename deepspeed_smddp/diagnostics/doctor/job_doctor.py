"""``smddp doctor``: of one process, or of the ranks of a job, which agree on one exit status."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.config import settings
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.doctor import (
    checks,
    coding_check,
    config_check,
    facts,
    measurements,
    rank_facts,
    routes_check,
)
from deepspeed_smddp.diagnostics.doctor.facts import Deviation, Finding, RankFacts, Verdict
from deepspeed_smddp.diagnostics.doctor.measurements import Measured
from deepspeed_smddp.diagnostics.doctor.rendezvous import Rendezvous, is_one_of_several, join
from deepspeed_smddp.diagnostics.rank_ports import ClockServer
from deepspeed_smddp.diagnostics.report.wording import count, rank_list
from deepspeed_smddp.errors import SmddpConfigError

# Exit statuses: all is well; something will fail; ranks differ or something is slow.
WELL, FAILED, LIMITED = 0, 1, 3

WIDTH = 80
STYLES = {Verdict.OK: "green", Verdict.LIMITED: "yellow", Verdict.FAILED: "red"}
# Of what all ranks share, these are shown; the others are counted.
_SHOWN = ("deepspeed-smddp", "torch", "DeepSpeed", "Python", "libfabric", "NICs", "MTU", "GPUs")


@dataclass
class JobReport:
    """The result of a run over all ranks."""

    size: int
    ranks: list[RankFacts] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    measured: Measured | None = None
    seconds: float = 0.0
    routes: list[str] = field(default_factory=list)  # what earlier jobs of rank 0's user measured

    @property
    def status(self) -> int:
        """The exit status of all ranks."""
        verdicts = {deviation.verdict for deviation in self.deviations}
        if Verdict.FAILED in verdicts:
            return FAILED
        return LIMITED if Verdict.LIMITED in verdicts else WELL

    def as_json(self) -> str:
        """The report as text; rates are bytes per second each way, times are seconds."""
        return to_json({"status": self.status, **vars(self)}, indent=2).decode()

    def show(self, json: Path | None) -> None:
        """Prints it as a page of 80 columns, and writes it as JSON."""
        output_files.write(json, self.as_json())
        if json != output_files.STANDARD_OUTPUT:
            console = Console()
            console.print(page(self), width=min(WIDTH, console.width), soft_wrap=False)


def run(ds_config: Path | None, json: Path | None, seconds: float, measure: bool = True) -> int:
    """Prints the report, on rank 0 only, and returns the exit status.

    The settings of ``ds_config`` apply. Ranks wait ``seconds`` for one another.
    """
    if not is_one_of_several():
        return _alone(ds_config, json)
    return _of_job(join(seconds), ds_config, seconds, json, measure)


def _alone(ds_config: Path | None, json: Path | None) -> int:
    output_files.check_writable([json])
    findings = list(checks.findings())
    findings[:0] = [Finding(fact.name, fact.value) for fact in rank_facts.software_facts()]
    findings += routes_check.findings()
    rows: list[checks.SettingRow] = []
    try:
        rows = checks.setting_rows(ds_config)
        findings += coding_check.findings(next(r.value for r in rows if r.name == "coding"))
        if ds_config is not None:
            findings += config_check.config_findings(ds_config)
    except SmddpConfigError as error:
        findings.append(Finding("settings", str(error), Verdict.FAILED))
    status = int(any(finding.verdict is Verdict.FAILED for finding in findings))
    found = {"status": status, "findings": findings, "settings": rows}
    output_files.write(json, to_json(found, indent=2).decode())
    if json != output_files.STANDARD_OUTPUT:
        Console().print(page_of_process(findings, rows))
    return status


def page_of_process(findings: list[Finding], rows: list[checks.SettingRow]) -> RenderableType:
    """What works here, the settings that are no defaults, and what does not work, with its count.

    Names of settings are never cut.
    """
    ordered = sorted(findings, key=lambda finding: list(Verdict).index(finding.verdict))
    table = Table.grid(padding=(0, 2))
    for finding in ordered:
        table.add_row(_verdict(finding), finding.name, Text(finding.text, overflow="fold"))
    changed = [row for row in rows if row.source != settings.DEFAULT]
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column(
        "setting", no_wrap=True, min_width=max((len(r.name) for r in changed), default=0)
    )
    shown.add_column("value", overflow="fold")
    shown.add_column("source", overflow="fold")
    for row in changed:
        shown.add_row(row.name, row.value, row.source)
    rest = f"{len(rows) - len(changed)} settings have their defaults (--json FILE lists them)."
    middle: list[Any] = [shown, Text()] if changed else []
    return Group(table, Text(), *middle, Text(rest), _summary(findings))


def _of_job(
    rendezvous: Rendezvous, ds_config: Path | None, seconds: float, json: Path | None, measure: bool
) -> int:
    """The exit status, the same on all ranks.

    Rank 0 prints while the other ranks still run: torchrun ends all ranks as soon as one has exited
    with a status other than 0.
    """
    began = time.monotonic()
    nonce = rendezvous.share("nonce", str, secrets.token_hex(8), seconds)
    if nonce is None:
        return FAILED
    own = rank_facts.collect(rendezvous.rank, ds_config, nonce)
    gathered = rendezvous.gather("facts", own, seconds)
    found = [gathered[rank] for rank in sorted(gathered)]
    measured = _measure(rendezvous, found, seconds) if measure else None
    status = 0
    if rendezvous.rank == 0:
        deviations = [*_missing(found, rendezvous.size, seconds), *facts.deviations(found)]
        if measured is not None:
            deviations += measured.deviations(found)
        deviations.sort(key=lambda deviation: deviation.verdict is not Verdict.FAILED)
        took = time.monotonic() - began
        known = [one.text for one in routes_check.findings()]
        report = JobReport(rendezvous.size, found, deviations, measured, took, known)
        report.show(json)
        status = report.status
    shared = rendezvous.share("status", int, status, 2 * seconds + 2 * measurements.SECONDS)
    rendezvous.leave()
    return FAILED if shared is None else shared


def _measure(rendezvous: Rendezvous, found: Sequence[RankFacts], seconds: float) -> Measured | None:
    """What the ranks with facts measure together; None on the other ranks than rank 0."""
    first, server, plan = rendezvous.rank == 0, None, None
    with contextlib.ExitStack() as on_return:
        if first:
            with contextlib.suppress(OSError):  # without a port, no host asks for the time
                server = ClockServer(os.environ.get("MASTER_ADDR", "localhost"))
                server.start()
                on_return.callback(server.close)
            plan = measurements.plan(found, server.contact() if server else "")
        plan = rendezvous.share("plan", measurements.Plan, plan, 2 * seconds + 60)
        if plan is None:
            return None
        part = measurements.run(rendezvous, plan)
        who = [rank.rank for rank in measurements.taking_part(found)]
        parts = rendezvous.gather("measured", part, measurements.SECONDS, who)
    stored = measurements.stored_network(found) if first else ""
    return measurements.joined(parts, found, stored) if first else None


def _missing(found: Sequence[RankFacts], size: int, seconds: float) -> list[Deviation]:
    gone = sorted(set(range(size)) - {rank.rank for rank in found})
    if not gone:
        return []
    text = f"{rank_list(gone)} did not answer within {seconds:.0f} s: see their processes' output"
    return [Deviation("ranks", text, Verdict.FAILED, tuple(gone))]


def page(report: JobReport) -> RenderableType:
    """What deviates in full, what all ranks share in one line, one sentence at the end."""
    hosts: dict[str, list[int]] = {}
    for rank in report.ranks:
        hosts.setdefault(rank.host, []).append(rank.rank)
    head = Text(f"{report.size} ranks on {count(len(hosts), 'host')}: ")
    head.append("; ".join(f"{host} ({rank_list(who)})" for host, who in hosts.items()))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7)
    table.add_column(width=17, overflow="fold")
    table.add_column(overflow="fold")
    for found in report.deviations:
        table.add_row(_verdict(found), found.name, Text(found.text))
    if report.ranks:
        equal = facts.same(report.ranks)
        known = {fact.name: fact.value.partition(" (")[0] for fact in equal}
        shown = [f"{name} {known[name]}" for name in _SHOWN if name in known]
        rest = f"{len(equal) - len(shown)} more facts and settings (--json FILE lists them)"
        table.add_row(Text("ok", "green"), "on all ranks", Text("; ".join([*shown, rest])))
    if report.measured is not None:
        text = "; ".join(report.measured.sentences())
        table.add_row(Text("ok", "green"), "measured", Text(text or "nothing"))
    for text in report.routes:
        table.add_row(Text("ok", "green"), "routes", Text(text))
    summary = _summary(report.deviations, f"; {report.seconds:.1f} s")
    return Group(head, Text(), table, Text(), summary)


def _summary(found: Sequence[Finding], more: str = "") -> Text:
    failed, limited = (
        sum(one.verdict is verdict for one in found)
        for verdict in (Verdict.FAILED, Verdict.LIMITED)
    )
    if failed or limited:
        counts = f"{failed} failed, {limited} limited{more}."
        return Text(counts, STYLES[Verdict.FAILED if failed else Verdict.LIMITED])
    return Text(f"Nothing wrong found{more}.", STYLES[Verdict.OK])


def _verdict(found: Finding) -> Text:
    return Text(found.verdict.value, STYLES[found.verdict])
