"""The report of ``smddp doctor`` over all ranks as text of at most 80 columns."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.diagnostics.doctor import deviations
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.job_doctor import JobReport

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
    head.append("; ".join(f"{host} {deviations.ranges(who)}" for host, who in hosts.items()))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7)
    table.add_column(width=17, overflow="fold")
    table.add_column(overflow="fold")
    for found in report.deviations:
        verdict = Text(found.verdict.value, STYLES[found.verdict])
        table.add_row(verdict, found.name, Text(found.text))
    if report.ranks:
        equal = deviations.same(report.ranks)
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
