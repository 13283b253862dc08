"""One run, from the start of all ranks to the CSV file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import record, report
from .competitors import Competitor, Copy, Core, Fake, Torch
from .duel import Duel, Rules
from .field import ROOT, Field, Machine, Network
from .plan import Case, cases
from .record import Row

sys.path.insert(0, str(ROOT))  # tests.testbed


def competitors(source: str, peers: Sequence[str]) -> list[Competitor]:
    out: list[Competitor] = []
    if source in ("core", "both"):
        out.append(Core("smddp"))
    if source in ("torch", "both"):
        out.append(Torch("smddp-torch", "smddp"))
    for name in peers:
        if name == "gloo":
            out.append(Torch("gloo", "gloo"))
        elif name == "smddp-shared":
            out.append(Core(name, "shared"))
        elif name == "copy":
            out.append(Copy())
        elif name == "fake":
            out.append(Fake())
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
        ours = record.source_version(ROOT)
        self.commits = {"smddp": ours, "smddp-shared": ours}
        package = importlib.util.find_spec("deepspeed_smddp")  # what the torch processes import
        if package is not None and package.origin is not None:
            tree = Path(package.origin).resolve().parents[1]
            self.commits["smddp-torch"] = record.source_version(tree)
        self.rate, nics = (str(args.rate), args.nics) if args.emulated else ("", None)
        self.settings = (args.hosts, args.ranks_per_host, self.rate, nics)

    def lacks(self, case: Case, name: str) -> bool:
        key = (case.op, case.dtype, case.bytes, *self.settings, name)
        return all(row.key() != key for row in self.old)

    def add(self, rows: list[Row], ceiling: float | None) -> None:
        for row in rows:
            row.machine, row.versions, row.rate = self.machine, self.versions, self.rate
            row.version = self.commits.get(row.competitor, row.version)
        self.new += rows
        self.set_ceiling(ceiling)

    def set_ceiling(self, ceiling: float | None) -> None:
        for row in self.new:
            if row.utilisation is not None and ceiling is not None:
                row.of_ceiling = row.utilisation / ceiling
        self.save()

    def save(self) -> None:
        if self.path is not None and self.new:
            record.write(self.path, self.old + self.new)


def run(args: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smddp-bench-")))
        where = (args.ranks_per_host, folder, args.core, args.peers_folder)
        ground: Field
        if args.emulated:
            from tests.testbed import Testbed

            reason = Testbed.missing()
            if reason:
                console.print(reason)
                return 1
            bed = Testbed(hosts=args.hosts, rate=args.rate, nics=args.nics)
            ground = Network(stack.enter_context(bed), *where)
        else:
            ground = Machine(args.hosts, *where)
        sheet = Sheet(args)
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
    field = competitors(args.source, args.peers)
    todo = [
        (case, names)
        for case in cases(args.ops, args.dtypes, args.sizes, ground.ranks)
        if (names := [c.name for c in field if c.plays(case) and sheet.lacks(case, c.name)])
    ]
    wanted = {name for _, names in todo for name in names}
    first = ground.ceiling()
    ours = ", ".join(f"{name} {commit}" for name, commit in sheet.commits.items())
    console.print(f"{sheet.machine}; {sheet.versions}; {ours}")
    text = f"{args.hosts} host{'s' if args.hosts > 1 else ''} x {args.ranks_per_host} ranks"
    if first is not None:
        text += f", {args.nics} x {args.rate}; bulk TCP both ways at once: "
        text += f"{100 * first:.1f} % of the rate"
    console.print(text)
    duel = Duel(
        ground,
        [c for c in field if c.name in wanted],
        Rules(args.turns, args.seconds_per_turn),
        lambda text: console.print(text, soft_wrap=True),
    )
    bar = Progress(
        TextColumn("{task.description:48}"),
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
                    bar.update(task, description=f"{case.op} {case.dtype} {case.bytes:,} {name}")

                sheet.add(duel.play(case, names, step), first)
                done += len(names) * (args.turns + 1)
                bar.update(task, completed=done)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured is kept")
    finally:
        idle = {name: crew.idle_cpu for name, crew in duel.crews.items()}
        duel.close()
    last = ground.ceiling()
    if first is not None and last is not None:
        sheet.set_ceiling((first + last) / 2)
        console.print(f"at the end bulk TCP reaches {100 * last:.1f} % of the rate")
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in idle.items())
    console.print(f"CPU time used while others had their turn: {spent}")
