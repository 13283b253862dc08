"""``smddp doctor``: of one process, or of all ranks if a launcher started it as one of several."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.diagnostics.doctor import checks as doctor
from deepspeed_smddp.diagnostics.doctor import job_doctor, rendezvous
from deepspeed_smddp.diagnostics.doctor.facts import Finding, Verdict
from deepspeed_smddp.distributed.launchers import LauncherError
from deepspeed_smddp.errors import SmddpConfigError


def run(config: Path | None, as_json: bool, seconds: float, measure: bool = True) -> int:
    """Prints the report, on rank 0 only, and returns the exit status.

    Args:
        config: a DeepSpeed config whose settings apply.
        as_json: JSON in place of tables.
        seconds: how long ranks wait for one another.
        measure: whether the ranks of a job measure their links, cores and clocks.
    """
    console = Console()

    def show(report: job_doctor.JobReport) -> None:
        if as_json:
            print(json.dumps(report.to_json(), indent=2), flush=True)
        else:
            job_doctor.print_report(report, console)

    try:
        if not rendezvous.launched():
            return _alone(config, as_json, console)
        return job_doctor.run(rendezvous.join(seconds), config, seconds, show, measure)
    except (LauncherError, rendezvous.RendezvousError) as error:
        Console(stderr=True, soft_wrap=True).print(
            Text(f"failed  {error}", job_doctor.STYLES[Verdict.FAILED])
        )
        return job_doctor.FAILED


def _alone(config: Path | None, as_json: bool, console: Console) -> int:
    found = list(doctor.findings())
    rows: list[doctor.SettingRow] = []
    try:
        rows = doctor.setting_rows(config)
    except SmddpConfigError as error:
        found.append(Finding("settings", str(error), Verdict.FAILED))
    failed = any(finding.verdict is Verdict.FAILED for finding in found)
    if as_json:
        findings = [{"name": f.name, "verdict": f.verdict.value, "text": f.text} for f in found]
        values = [{"name": r.name, "value": r.value, "source": r.source} for r in rows]
        print(
            json.dumps({"status": int(failed), "findings": findings, "settings": values}, indent=2)
        )
        return int(failed)
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in found:
        verdict = Text(finding.verdict.value, job_doctor.STYLES[finding.verdict])
        table.add_row(verdict, finding.name, Text(finding.text))
    console.print(table)
    settings = Table("setting", "value", "source", "meaning", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        settings.add_row(row.name, Text(row.value), row.source, row.meaning)
    if rows:
        console.print()
        console.print(settings)
    return int(failed)
