"""The command line of a training step's benchmark: options, turns, what is shown and written."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hosts import record as files
from hosts.duel import Rules
from hosts.field import ROOT, Field, Machine, Network
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import report
from .crews import FREE, Trainers
from .match import LossesDiffer, Match
from .record import Row, settings, title
from .workload import Workload, resized

sys.path.insert(0, str(ROOT))  # tests.testbed

DIMENSIONS = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch")


def add_options(
    parser: argparse.ArgumentParser,
    workloads: Mapping[str, Workload],
    devices: Sequence[str] = ("cpu", "cuda"),
) -> None:
    add = parser.add_argument_group("what runs where").add_argument
    add("--ranks", type=int, metavar="N", help="on this machine as it is; the default, with 2")
    add("--hosts", type=int, default=2, metavar="K", help="emulated hosts; default 2")
    add("--ranks-per-host", type=int, metavar="R", help="on emulated hosts")
    add("--rate", default="1gbit", help="of each emulated interface, each way, as tc writes it")
    add("--nics", type=int, default=1, help="emulated interfaces per host")
    add("--device", choices=devices, default="cpu")
    add(
        "--peers",
        help="backends of torch.distributed to compare with, or 'none'; default: gloo; GPUs: nccl; "
        "one with other settings, for a comparison of settings: NAME:VARIABLE=VALUE[:...]",
    )

    add = parser.add_argument_group("what a step is").add_argument
    tokens = ", ".join(f"{name}: {load.tokens:,}" for name, load in workloads.items())
    first = next(iter(workloads))
    add("--config", choices=tuple(workloads), default=first, help=f"tokens per rank; {tokens}")
    for name in DIMENSIONS:
        add(f"--{name}", type=int, metavar="N", help="in place of the configuration's")

    add = parser.add_argument_group("how long").add_argument
    add("--turns", type=int, default=7, help="of each backend; figures are medians over them")
    add("--seconds-per-turn", type=float, default=4.0, metavar="S", help="of the slowest")

    add = parser.add_argument_group("what is written").add_argument
    add("--csv", type=Path, help="one row per turn")
    add("--figure", type=Path, help="the figure, as PNG, PDF or SVG")
    add("--show", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these files")


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
    for peer in args.peers:
        if backends(args).count(peer) > 1:
            parser.error(f"--peers: {peer} is named twice, or takes part anyway")
        for setting in peer.split(":")[1:]:
            if "=" not in setting:
                parser.error(f"--peers {peer}: {setting} is no VARIABLE=VALUE")
    if args.turns < 1:
        parser.error("--turns must be at least 1")


def workload(args: argparse.Namespace, workloads: Mapping[str, Workload]) -> Workload:
    return resized(workloads[args.config], **{name: getattr(args, name) for name in DIMENSIONS})


def backends(args: argparse.Namespace) -> list[str]:
    """Who takes turns, in this order."""
    return [report.OURS, *args.peers, FREE]


def threads(args: argparse.Namespace) -> int:
    """Per rank: the ranks share this machine's processors."""
    return max(1, (os.cpu_count() or 1) // (args.hosts * args.ranks_per_host))


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


def run(
    args: argparse.Namespace, trainers: Sequence[Trainers], console: Console
) -> tuple[int, list[Row]]:
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
        status = play(args, ground, trainers, sheet, console)
    show(sheet.rows, console)
    if sheet.path is not None and sheet.rows:
        console.print(f"{len(sheet.rows)} rows in {sheet.path}")
    return status, sheet.rows


def play(
    args: argparse.Namespace,
    ground: Field,
    trainers: Sequence[Trainers],
    sheet: Sheet,
    console: Console,
) -> int:
    """All turns; what was measured before Ctrl-C is kept. Returns the exit status."""
    load = trainers[0].load
    rate = ground.rate or 0.0
    first = ground.ceiling()
    console.print(f"{sheet.machine}; {sheet.versions}; smddp {sheet.commit}")
    if first is not None:
        console.print(f"bulk TCP both ways at once: {100 * first:.1f} % of the rate")
    console.print("starting all ranks; their imports take each some seconds of a core")

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    rules = Rules(args.turns, args.seconds_per_turn, patience=600)
    match: Match | None = None
    status = 0
    try:
        match = Match(ground, trainers, rules, say)
        console.print(
            f"GPT-NeoX, {match.parameters / 1e6:.2f} million parameters, {load.layers} layers of "
            f"{load.hidden}, {load.tokens} tokens per rank and step, "
            f"{trainers[0].threads} threads per rank"
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


def main(
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace], Sequence[Trainers]],
) -> int:
    """``make`` says who takes part, once the options are complete."""
    args = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    status = 0
    if args.show:
        rows = [row for path in args.show for row in files.read_as(Row, path)]
        show(rows, console)
    else:
        complete(args, parser)
        status, rows = run(args, make(args), console)
    if args.figure and rows:
        from .chart import draw

        draw(rows, args.figure)
        console.print(f"wrote {args.figure}")
    return status
