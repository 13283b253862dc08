"""A ZeRO-3 training step over smddp beside the same step over Gloo, in turns: A B C A B C.

README.md says what is measured, and how.

Between emulated hosts, each with network interfaces of a given rate (needs root):

    python benchmarks/zero3_step.py --hosts 2 --ranks-per-host 1 --rate 1gbit \\
        --csv runs/zero3-2x1.csv --figure runs/zero3-2x1.png

Inside one host:

    python benchmarks/zero3_step.py --ranks 2 --csv runs/zero3-host.csv

The figure and the tables of several runs:

    python benchmarks/zero3_step.py --show runs/zero3-*.csv --figure runs/zero3.png
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
from hosts import record as files
from hosts.duel import Rules
from hosts.field import ROOT, Field, Machine, Network
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from zero3 import report
from zero3.crews import FREE, Trainers
from zero3.match import LossesDiffer, Match
from zero3.record import Row, settings, title
from zero3.workload import WORKLOADS, Workload, resized

sys.path.insert(0, str(ROOT))  # tests.testbed


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("what runs where").add_argument
    add("--ranks", type=int, metavar="N", help="on this machine as it is; the default, with 2")
    add("--hosts", type=int, default=2, metavar="K", help="emulated hosts; default 2")
    add("--ranks-per-host", type=int, metavar="R", help="on emulated hosts")
    add("--rate", default="1gbit", help="of each emulated interface, each way, as tc writes it")
    add("--nics", type=int, default=1, help="emulated interfaces per host")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--peers",
        help="backends of torch.distributed to compare with, or 'none'; default: gloo; GPUs: nccl",
    )

    add = parser.add_argument_group("what a step is").add_argument
    add(
        "--config",
        choices=tuple(WORKLOADS),
        default="communication",
        help="bound by communication (64 tokens per rank; small: a smaller model) or by computing "
        "(2,048 tokens)",
    )
    for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "batch"):
        add(f"--{name}", type=int, metavar="N", help="in place of the configuration's")
    add(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed settings (JSON or hjson) over the built-in ones, section by section, for "
        'all backends; the section "smddp" concerns smddp alone',
    )

    add = parser.add_argument_group("how long").add_argument
    add("--turns", type=int, default=7, help="of each backend; figures are medians over them")
    add("--seconds-per-turn", type=float, default=4.0, metavar="S", help="of the slowest")

    add = parser.add_argument_group("what is written").add_argument
    add("--csv", type=Path, help="one row per turn")
    add("--figure", type=Path, help="the figure, as PNG, PDF or SVG")
    add("--show", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these files")
    return parser


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options and fills in what depends on others."""
    if args.ranks is not None and args.ranks_per_host is not None:
        parser.error("--ranks is for this machine, --ranks-per-host for emulated hosts")
    args.emulated = args.ranks_per_host is not None
    if not args.emulated:
        args.hosts, args.ranks_per_host = 1, args.ranks or 2
    elif args.hosts < 2:
        parser.error("emulated hosts are two or more; inside one host takes --ranks")
    peers = args.peers or ("nccl" if args.device == "cuda" else "gloo")
    args.peers = [] if peers == "none" else peers.split(",")
    args.over = read_config(args.ds_config, parser) if args.ds_config else {}
    if args.turns < 1:
        parser.error("--turns must be at least 1")


def read_config(path: Path, parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    try:
        found = hjson.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--ds-config {path}: {error}")
    if not isinstance(found, Mapping):
        parser.error(f"--ds-config {path} is no object of settings")
    return dict(found)


def workload(args: argparse.Namespace) -> Workload:
    names = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch")
    return resized(WORKLOADS[args.config], **{name: getattr(args, name) for name in names})


class Sheet:
    """The rows of this run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path | None = args.csv
        self.rows: list[Row] = []
        self.machine, self.versions = files.machine(), files.versions()
        self.commit = files.source_version(ROOT)
        self.rate = str(args.rate) if args.emulated else ""

    def add(self, rows: list[Row], ceiling: float | None) -> None:
        for row in rows:
            row.machine, row.rate = self.machine, self.rate
            row.versions = f"{self.versions}; {row.version}"
            row.version = self.commit if row.competitor == report.OURS else row.competitor
        self.rows += rows
        self.set_ceiling(ceiling)

    def set_ceiling(self, ceiling: float | None) -> None:
        """In bytes per second; of one host's interfaces, each way."""
        for row in self.rows:
            row.ceiling = ceiling
        if self.path is not None and self.rows:
            files.write(self.path, self.rows)


def run(args: argparse.Namespace, console: Console) -> tuple[int, list[Row]]:
    """The exit status, and what was measured."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smddp-bench-")))
        where = (args.ranks_per_host, folder, Path(), Path())  # no other programs take part
        ground: Field
        if args.emulated:
            from tests.testbed import Testbed

            reason = Testbed.missing()
            if reason:
                console.print(reason)
                return 1, []
            bed = Testbed(hosts=args.hosts, rate=args.rate, nics=args.nics)
            ground = Network(stack.enter_context(bed), *where)
        else:
            ground = Machine(1, *where)
        sheet = Sheet(args)
        status = play(args, ground, sheet, console)
    show(sheet.rows, console)
    if sheet.path is not None and sheet.rows:
        console.print(f"{len(sheet.rows)} rows in {sheet.path}")
    return status, sheet.rows


def play(args: argparse.Namespace, ground: Field, sheet: Sheet, console: Console) -> int:
    """All turns; what was measured before Ctrl-C is kept. Returns the exit status."""
    load = workload(args)
    threads = max(1, (os.cpu_count() or 1) // ground.ranks)
    names = [report.OURS, *args.peers, FREE]
    trainers = [Trainers(name, load, args.over, args.device, threads) for name in names]
    rate = ground.rate or 0.0
    first = ground.ceiling()
    console.print(f"{sheet.machine}; {sheet.versions}; smddp {sheet.commit}")
    if first is not None:
        console.print(f"bulk TCP both ways at once: {100 * first:.1f} % of the rate")
    console.print("starting all ranks; importing DeepSpeed takes each some seconds of a core")

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    rules = Rules(args.turns, args.seconds_per_turn, patience=600)
    match: Match | None = None
    status = 0
    try:
        match = Match(ground, trainers, rules, say)
        console.print(
            f"GPT-NeoX, {match.parameters / 1e6:.2f} million parameters, {load.layers} layers of "
            f"{load.hidden}, {load.tokens} tokens per rank and step, {threads} threads per rank"
        )
        bar = Progress(
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        with bar:
            task = bar.add_task("", total=len(match.crews) * (args.turns + 1))

            def step(name: str) -> None:
                bar.update(task, description=name)
                bar.advance(task)

            match.warm_up(step)
            for turn in range(1, args.turns + 1):
                sheet.add(match.round(turn, step), None if first is None else first * rate)
                match.check_losses()
    except KeyboardInterrupt:
        console.print("interrupted: what was measured is kept")
        status = 130
    except LossesDiffer as error:
        console.print(f"[red]{error}[/red]")
        status = 1
    finally:
        if match is not None:
            idle = {name: crew.idle_cpu for name, crew in match.crews.items()}
            status = status or int(bool(match.failed))
            match.close()
    last = ground.ceiling() if sheet.rows else None
    if first is not None and last is not None:
        sheet.set_ceiling((first + last) / 2 * rate)
        console.print(f"at the end bulk TCP reaches {100 * last:.1f} % of the rate")
    if match is not None:
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in idle.items())
        console.print(f"CPU time used while others had their turn: {spent}")
    return status


def show(rows: list[Row], console: Console) -> None:
    for found in settings(rows):
        changes = found.rows[0].changes
        console.print(f"\n[bold]{title(found.rows)}[/bold] {changes}", highlight=False)
        console.print(report.table(found))
        for line in report.lines(found):
            console.print(line, soft_wrap=True, highlight=False)


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    status = 0
    if args.show:
        rows = [row for path in args.show for row in files.read_as(Row, path)]
        show(rows, console)
    else:
        complete(args, parser)
        status, rows = run(args, console)
    if args.figure and rows:
        from zero3.chart import draw

        draw(rows, args.figure)
        console.print(f"wrote {args.figure}")
    return status


if __name__ == "__main__":
    sys.exit(main())
