"""One run: it starts all ranks, measures all cases, and writes the results."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from shared import csv_rows, provenance
from shared.alternation import Rules
from shared.build import Build, other_build, this_build
from shared.command_line import (
    NoTestbed,
    layout,
    make_console,
    name_outputs,
    open_hosts,
    progress_bar,
)
from shared.host_set import HostSet
from shared.page import Origin, write_page

from . import mpi, tables, tables_of_builds
from .call_alternation import CallAlternation
from .call_rows import Row
from .cases import Case, cases
from .comparison import FROM_TORCH, OURS
from .competitors import CallCompetitor, Copy, Core, Fake, Forced, Sockets, Torch

SHARED = f"{OURS}-shared"
ASYNC = f"{OURS}-async"
CODED = f"{OURS}-coded"
FORCED = {f"{OURS}-{pattern}": f"algorithm={pattern}" for pattern in ("direct", "log", "joint")}
FORCED |= {f"{OURS}-slots": "single_copy=0", f"{OURS}-reads": "single_copy=1"}


def competitors(args: argparse.Namespace, builds: Sequence[Build]) -> list[CallCompetitor]:
    """In the order of their turns; ``builds``: this one, then the other one if there is one."""
    this = builds[0]
    out: list[CallCompetitor] = []
    if args.source in ("core", "both"):
        out += [Core(OURS, build) for build in builds]
    if args.source in ("torch", "both"):
        out += [Torch(FROM_TORCH, "smddp", build) for build in builds]
    for name in args.peers:
        if name == "gloo":
            out.append(Torch("gloo", "gloo", this))
        elif name == SHARED:
            out += [Core(SHARED, build, "shared") for build in builds]
        elif name == ASYNC:
            out += [Core(ASYNC, build, "async") for build in builds]
        elif name == CODED:
            out += [Core(CODED, build, "coded") for build in builds]
        elif name in FORCED:
            out += [Forced(name, build, FORCED[name]) for build in builds]
        elif name == "copy":
            out.append(Copy(this.core.with_name("copy_collectives")))
        elif name in ("sockets", "sockets-doubling"):
            program = this.core.with_name("plain_sockets")
            out.append(Sockets(name, program, name == "sockets-doubling"))
        elif name == "fake":
            out.append(Fake(this))
        else:
            out.append(mpi.peer(name, args.peers_folder))
    return out


class Results:
    """The rows of this run, and those of the file that it resumes."""

    def __init__(self, args: argparse.Namespace, builds: Sequence[Build]) -> None:
        self.path: Path | None = args.csv or args.resume
        resumes = args.resume and args.resume.exists()
        self.old = csv_rows.read(Row, args.resume) if resumes else []
        self.new: list[Row] = []
        self.commits: dict[str, str] = {}
        for build in builds:
            core, package = build.core_version(), build.package_version()
            self.commits |= {
                f"{name}{build.suffix}": core for name in (OURS, SHARED, ASYNC, CODED, *FORCED)
            }
            self.commits[f"{FROM_TORCH}{build.suffix}"] = package
        commits = ", ".join(f"{name} {commit}" for name, commit in self.commits.items())
        self.origin = Origin(provenance.machine(), provenance.versions(), commits)
        self.rate, nics = (str(args.rate), args.nics) if args.emulated else ("", None)
        self.settings = (args.hosts, args.ranks_per_host, self.rate, nics)

    @property
    def rows(self) -> list[Row]:
        return self.old + self.new

    def lacks(self, case: Case, name: str) -> bool:
        key = (case.op, case.dtype, case.bytes, *self.settings, name)
        return all(row.key() != key for row in self.old)

    def add(self, rows: list[Row], ceiling: float | None) -> None:
        for row in rows:
            row.machine, row.versions = self.origin.machine, self.origin.versions
            row.rate = self.rate
            row.version = self.commits.get(row.competitor, row.version)
        self.new += rows
        self.set_ceiling(ceiling)

    def set_ceiling(self, ceiling: float | None) -> None:
        """Sets the utilisation that bulk TCP reaches, and writes the file."""
        for row in self.new:
            if row.utilisation is not None and ceiling is not None:
                row.of_ceiling = row.utilisation / ceiling
        if self.path is not None and self.new:
            csv_rows.write(self.path, self.rows)


def run(args: argparse.Namespace) -> int:
    console = make_console()
    name_outputs(args, layout(args))
    builds = [this_build(args.core)]
    builds += [other_build(args.other_build)] if args.other_build else []
    results = Results(args, builds)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="smddp-bench-") as folder,
            open_hosts(args, Path(folder)) as hosts,
        ):
            measure(args, hosts, competitors(args, builds), results, console)
    except NoTestbed as error:
        console.print(str(error))
        return 1
    show(args, results, console)
    return 0


def measure(
    args: argparse.Namespace,
    hosts: HostSet,
    taking_part: Sequence[CallCompetitor],
    results: Results,
    console: Console,
) -> None:
    """All cases; after Ctrl-C the figures so far are kept."""
    todo = [
        (case, names)
        for case in cases(args.ops, args.dtypes, args.sizes, hosts.ranks)
        if (
            names := [
                c.name for c in taking_part if c.measures(case) and results.lacks(case, c.name)
            ]
        )
    ]
    wanted = {name for _, names in todo for name in names}
    first = hosts.ceiling()
    console.print(results.origin.line())
    console.print(f"{where(args)}{of_rate(args, first)}")
    alternation = CallAlternation(
        hosts,
        [c for c in taking_part if c.name in wanted],
        Rules(args.turns, args.seconds_per_turn),
        lambda text: console.print(text, soft_wrap=True),
    )
    try:
        take_turns(args, alternation, todo, results, first, console)
    except KeyboardInterrupt:
        console.print("interrupted: the figures so far are kept")
    finally:
        idle = alternation.idle_cpu()
        alternation.close()
    last = hosts.ceiling()
    if first is not None and last is not None:
        results.set_ceiling((first + last) / 2)
        console.print(f"at the end bulk TCP reaches {100 * last:.1f} % of the rate")
    console.print(f"CPU time used during the turns of others: {idle}")


def take_turns(
    args: argparse.Namespace,
    alternation: CallAlternation,
    todo: Sequence[tuple[Case, Sequence[str]]],
    results: Results,
    ceiling: float | None,
    console: Console,
) -> None:
    with progress_bar(console, width=48) as bar:
        task = bar.add_task("", total=sum(len(names) * (args.turns + 1) for _, names in todo))
        done = 0
        for case, names in todo:

            def on_turn(name: str, case: Case = case) -> None:
                bar.advance(task)
                bar.update(task, description=f"{case.op} {case.dtype} {case.bytes:,} {name}")

            results.add(alternation.measure(case, names, on_turn), ceiling)
            done += len(names) * (args.turns + 1)
            bar.update(task, completed=done)


def where(args: argparse.Namespace) -> str:
    return f"{args.hosts} host{'s' if args.hosts > 1 else ''} x {args.ranks_per_host} ranks"


def of_rate(args: argparse.Namespace, ceiling: float | None) -> str:
    if ceiling is None:
        return ""
    text = f", {args.nics} x {args.rate}; bulk TCP in both directions at once: "
    return f"{text}{100 * ceiling:.1f} % of the rate"


def show(args: argparse.Namespace, results: Results, console: Console) -> None:
    """The tables on the terminal, and the files."""
    console.print(tables.terminal_table(results.new))
    if args.other_build:
        console.print(tables_of_builds.terminal_table(results.new))
    if results.path is not None:
        console.print(f"{len(results.new)} rows in {results.path}")
    if args.figure and results.rows:
        from .charts import draw

        draw(results.rows, args.figure)
        console.print(f"wrote {args.figure}")
    if args.folder and results.rows:
        text = tables.markdown(results.rows)
        path = write_page(args.folder, args.name, where(args), results.origin, text)
        console.print(f"wrote {path}")
