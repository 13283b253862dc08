"""One run between emulated hosts, from the testbed's start to the CSV file."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import record, report
from .competitors import Competitor, Core, Torch
from .duel import Duel, Rules
from .field import ROOT, Field
from .plan import Case, cases
from .record import Row

sys.path.insert(0, str(ROOT))  # tests.testbed


def competitors(source: str, peers: Sequence[str]) -> list[Competitor]:
    out: list[Competitor] = []
    if source in ("core", "both"):
        out.append(Core())
    if source in ("torch", "both"):
        out.append(Torch("smddp-torch", "smddp"))
    for name in peers:
        if name == "gloo":
            out.append(Torch("gloo", "gloo"))
        else:
            from . import mpi

            out.append(mpi.peer(name))
    return out


class Sheet:
    """The rows of this run and of the file that it resumes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path | None = args.csv or args.resume
        self.old = record.read(args.resume) if args.resume and args.resume.exists() else []
        self.new: list[Row] = []
        self.machine, self.versions = record.machine(), record.versions()
        self.commits = {"smddp": record.source_version(ROOT)}
        package = importlib.util.find_spec("deepspeed_smddp")  # what the torch processes import
        if package is not None and package.origin is not None:
            tree = Path(package.origin).resolve().parents[1]
            self.commits["smddp-torch"] = record.source_version(tree)
        self.rate = str(args.rate)
        self.settings = (args.hosts, args.ranks_per_host, args.rate, args.nics)

    def lacks(self, case: Case, name: str) -> bool:
        key = (case.op, case.dtype, case.bytes, *self.settings, name)
        return all(row.key() != key for row in self.old)

    def add(self, rows: list[Row], ceiling: float) -> None:
        for row in rows:
            row.machine, row.versions, row.rate = self.machine, self.versions, self.rate
            row.version = self.commits.get(row.competitor, row.version)
            row.of_ceiling = row.utilisation / ceiling
        self.new += rows
        self.save()

    def set_ceiling(self, ceiling: float) -> None:
        for row in self.new:
            row.of_ceiling = row.utilisation / ceiling
        self.save()

    def save(self) -> None:
        if self.path is not None and self.new:
            record.write(self.path, self.old + self.new)


def run(args: argparse.Namespace) -> int:
    from tests.testbed import Testbed

    console = Console() if sys.stdout.isatty() else Console(width=160)
    reason = Testbed.missing()
    if reason:
        console.print(reason)
        return 1
    sheet = Sheet(args)
    with (
        tempfile.TemporaryDirectory(prefix="smddp-bench-") as folder,
        Testbed(hosts=args.hosts, rate=args.rate, nics=args.nics) as bed,
    ):
        ground = Field(bed, args.ranks_per_host, Path(folder), args.core, args.peers_folder)
        play(args, ground, sheet, console)
    console.print(report.table(sheet.new))
    if sheet.path is not None:
        console.print(f"{len(sheet.new)} rows in {sheet.path}")
    if args.figure and sheet.old + sheet.new:
        from figure import draw

        draw(sheet.old + sheet.new, args.figure)
        console.print(f"wrote {args.figure}")
    return 0


def play(args: argparse.Namespace, ground: Field, sheet: Sheet, console: Console) -> None:
    """All cases; what was measured before Ctrl-C is kept."""
    from tests.testbed import ceiling

    field = competitors(args.source, args.peers)
    todo = [
        (case, names)
        for case in cases(args.ops, args.sizes, ground.ranks)
        if (names := [c.name for c in field if sheet.lacks(case, c.name)])
    ]
    wanted = {name for _, names in todo for name in names}
    first = ceiling(ground.bed)
    ours = ", ".join(f"{name} {commit}" for name, commit in sheet.commits.items())
    console.print(f"{sheet.machine}; {sheet.versions}; {ours}")
    console.print(
        f"{args.hosts} hosts x {args.ranks_per_host} ranks, {args.nics} x {args.rate}; "
        f"bulk TCP both ways at once: {100 * first.utilisation:.1f} % of the rate"
    )
    duel = Duel(
        ground,
        [c for c in field if c.name in wanted],
        Rules(args.turns, args.seconds_per_turn),
        lambda text: console.print(text, soft_wrap=True),
    )
    bar = Progress(
        TextColumn("{task.description:44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    try:
        with bar:
            steps = sum(len(names) * (args.turns + 1) for _, names in todo)
            task = bar.add_task("", total=steps)
            done = 0
            for case, names in todo:

                def step(name: str, case: Case = case) -> None:
                    bar.advance(task)
                    bar.update(task, description=f"{case.op} {case.bytes:,} {name}")

                sheet.add(duel.play(case, names, step), first.utilisation)
                done += len(names) * (args.turns + 1)
                bar.update(task, completed=done)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured is kept")
    finally:
        idle = {name: crew.idle_cpu for name, crew in duel.crews.items()}
        duel.close()
    last = ceiling(ground.bed)
    sheet.set_ceiling((first.utilisation + last.utilisation) / 2)
    console.print(f"at the end bulk TCP reaches {100 * last.utilisation:.1f} % of the rate")
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in idle.items())
    console.print(f"CPU time used while others had their turn: {spent}")
