"""The command line of a training step's benchmark: options, turns, tables and files."""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from shared import csv_rows, provenance
from shared.alternation import Rules
from shared.build import Build, other_build, this_build
from shared.command_line import (
    NoTestbed,
    add_host_options,
    add_other_build,
    add_output_options,
    layout,
    make_console,
    name_outputs,
    open_hosts,
    progress_bar,
)
from shared.host_set import HostSet
from shared.page import Origin, write_page

from . import step_tables
from .step_alternation import LossesDiffer, StepAlternation
from .step_rows import Row, settings, title
from .trainers import FREE, OURS, Trainers
from .workload import Workload, resized

DIMENSIONS = ("layers", "hidden", "heads", "vocabulary", "sequence", "batch")


def add_options(
    parser: argparse.ArgumentParser,
    workloads: Mapping[str, Workload],
    devices: Sequence[str] = ("cpu", "cuda"),
) -> None:
    add_host_options(parser, hosts=2, hosts_help="number of emulated hosts; default: 2")

    group = parser.add_argument_group("competitors")
    group.add_argument("--device", choices=devices, default="cpu")
    group.add_argument(
        "--peers",
        help="backends of torch.distributed to compare with, or 'none'; default: gloo, on GPUs "
        "nccl. NAME:VARIABLE=VALUE[:...] is a backend with other settings, to compare settings",
    )
    add_other_build(group)

    add = parser.add_argument_group("workload").add_argument
    tokens = ", ".join(f"{name}: {load.tokens:,}" for name, load in workloads.items())
    first = next(iter(workloads))
    add("--config", choices=tuple(workloads), default=first, help=f"tokens per rank: {tokens}")
    for name in DIMENSIONS:
        add(f"--{name}", type=int, metavar="N", help="replaces the value of the configuration")

    add = parser.add_argument_group("duration").add_argument
    add("--turns", type=int, default=7, help="turns of each backend; figures are their medians")
    add(
        "--seconds-per-turn",
        type=float,
        default=4.0,
        metavar="S",
        help="length of a turn of the slowest backend; default: 4",
    )

    group = add_output_options(parser, rows="file for all figures, one row per turn")
    group.add_argument(
        "--show", type=Path, nargs="+", metavar="CSV", help="show these files; measure nothing"
    )


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options and fills in those that depend on others."""
    if args.ranks is not None and args.ranks_per_host is not None:
        parser.error("--ranks is for this machine, --ranks-per-host for emulated hosts")
    args.emulated = args.ranks_per_host is not None
    if not args.emulated:
        args.hosts, args.ranks_per_host = 1, args.ranks or 2
    elif args.hosts < 2:
        parser.error("emulated hosts must be two or more; use --ranks inside one host")
    peers = args.peers or ("nccl" if args.device == "cuda" else "gloo")
    args.peers = [] if peers == "none" else peers.split(",")
    for peer in args.peers:
        if [OURS, *args.peers, FREE].count(peer) > 1:
            parser.error(f"--peers: {peer} is named twice, or takes part anyway")
        for setting in peer.split(":")[1:]:
            if "=" not in setting:
                parser.error(f"--peers {peer}: {setting} is not VARIABLE=VALUE")
    if args.turns < 1:
        parser.error("--turns must be at least 1")


def workload(args: argparse.Namespace, workloads: Mapping[str, Workload]) -> Workload:
    return resized(workloads[args.config], **{name: getattr(args, name) for name in DIMENSIONS})


def backends(args: argparse.Namespace) -> list[tuple[str, Build]]:
    """The backend and the build of each competitor, in the order of their turns."""
    this = this_build()
    others = [(OURS, other_build(args.other_build))] if args.other_build else []
    return [(OURS, this), *others, *((name, this) for name in [*args.peers, FREE])]


def threads(args: argparse.Namespace) -> int:
    """Threads per rank: the ranks share the processors of this machine."""
    return max(1, (os.cpu_count() or 1) // (args.hosts * args.ranks_per_host))


class Results:
    """The rows of this run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path | None = args.csv
        self.rows: list[Row] = []
        self.commits = {
            f"{name}{build.suffix}": build.package_version()
            for name, build in backends(args)
            if name == OURS
        }
        commits = ", ".join(f"{name} {commit}" for name, commit in self.commits.items())
        self.origin = Origin(provenance.machine(), provenance.versions(), commits)
        self.rate = str(args.rate) if args.emulated else ""

    def add(self, rows: list[Row], ceiling: float | None) -> None:
        for row in rows:
            row.machine, row.rate = self.origin.machine, self.rate
            row.versions = f"{self.origin.versions}; {row.version}"
            row.version = self.commits.get(row.competitor, row.competitor)
        self.rows += rows
        self.set_ceiling(ceiling)

    def set_ceiling(self, ceiling: float | None) -> None:
        """In bytes per second, of the interfaces of one host, each way. Writes the file."""
        for row in self.rows:
            row.ceiling = ceiling
        if self.path is not None and self.rows:
            csv_rows.write(self.path, self.rows)


@dataclass
class Run:
    """One run, from the start of all ranks to the last turn."""

    args: argparse.Namespace
    hosts: HostSet
    trainers: Sequence[Trainers]
    results: Results
    console: Console

    def measure(self) -> int:
        """All turns; after Ctrl-C the figures so far are kept. Returns the exit status."""
        rate = self.hosts.rate or 0.0
        first = self.hosts.ceiling()
        self.console.print(self.results.origin.line())
        if first is not None:
            self.console.print(
                f"bulk TCP in both directions at once: {100 * first:.1f} % of the rate"
            )
        self.console.print("starting all ranks; the imports of each take some seconds of a core")
        status, idle = self._take_turns(None if first is None else first * rate)
        last = self.hosts.ceiling() if self.results.rows else None
        if first is not None and last is not None:
            self.results.set_ceiling((first + last) / 2 * rate)
            self.console.print(f"at the end bulk TCP reaches {100 * last:.1f} % of the rate")
        if idle:
            self.console.print(f"CPU time used during the turns of others: {idle}")
        return status

    def _take_turns(self, ceiling: float | None) -> tuple[int, str]:
        """The exit status, and the CPU time that each competitor used during others' turns."""
        rules = Rules(self.args.turns, self.args.seconds_per_turn, timeout=600)
        alternation: StepAlternation | None = None
        status, idle = 0, ""
        try:
            alternation = StepAlternation(self.hosts, self.trainers, rules, self._log)
            self._print_model(alternation.parameters)
            self._alternate(alternation, ceiling)
        except KeyboardInterrupt:
            self.console.print("interrupted: the figures so far are kept")
            status = 130
        except LossesDiffer as error:
            self.console.print(f"[red]{error}[/red]")
            status = 1
        finally:
            if alternation is not None:
                idle = alternation.idle_cpu()
                status = status or int(bool(alternation.failed))
                alternation.close()
        return status, idle

    def _alternate(self, alternation: StepAlternation, ceiling: float | None) -> None:
        with progress_bar(self.console, width=32) as bar:
            task = bar.add_task("", total=len(alternation.running) * (self.args.turns + 1))

            def on_turn(description: str) -> None:
                bar.update(task, description=description)
                bar.advance(task)

            alternation.warm_up(on_turn)
            for turn in range(1, self.args.turns + 1):
                self.results.add(alternation.measure(turn, on_turn), ceiling)
                alternation.check_losses()

    def _print_model(self, parameters: int) -> None:
        load = self.trainers[0].load
        self.console.print(
            f"GPT-NeoX, {parameters / 1e6:.2f} million parameters, {load.layers} layers of "
            f"{load.hidden}, {load.tokens} tokens per rank and step, "
            f"{self.trainers[0].threads} threads per rank"
        )

    def _log(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def run(
    args: argparse.Namespace, trainers: Sequence[Trainers], console: Console
) -> tuple[int, list[Row]]:
    """The exit status, and the rows that were measured."""
    name_outputs(
        args, f"{trainers[0].scheme.lower().replace('-', '')}-{args.config}-{layout(args)}"
    )
    results = Results(args)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="smddp-bench-") as folder,
            open_hosts(args, Path(folder)) as hosts,
        ):
            status = Run(args, hosts, trainers, results, console).measure()
    except NoTestbed as error:
        console.print(str(error))
        return 1, []
    show(results.rows, console)
    if results.path is not None and results.rows:
        console.print(f"{len(results.rows)} rows in {results.path}")
    if args.folder and results.rows:
        text = io.StringIO()
        show(results.rows, Console(file=text, width=120))
        tables = f"```\n{text.getvalue().strip()}\n```"
        path = write_page(args.folder, args.name, title(results.rows), results.origin, tables)
        console.print(f"wrote {path}")
    return status, results.rows


def show(rows: list[Row], console: Console) -> None:
    for found in settings(rows):
        changes = found.rows[0].changes
        console.print(f"\n[bold]{title(found.rows)}[/bold] {changes}", highlight=False)
        console.print(step_tables.table(found))
        for line in step_tables.lines(found):
            console.print(line, soft_wrap=True, highlight=False)


def main(
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace], Sequence[Trainers]],
) -> int:
    """``make`` returns the competitors, once the options are complete."""
    args = parser.parse_args()
    console = make_console()
    status = 0
    if args.show:
        rows = [row for path in args.show for row in csv_rows.read(Row, path)]
        show(rows, console)
    else:
        complete(args, parser)
        status, rows = run(args, make(args), console)
    if args.figure and rows:
        from .step_chart import draw

        draw(rows, args.figure)
        console.print(f"wrote {args.figure}")
    return status
