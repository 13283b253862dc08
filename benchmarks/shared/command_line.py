"""Options and terminal output that the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .build import OTHER_BUILD_HELP
from .host_set import EmulatedHosts, HostSet, ThisMachine, make_testbed


class NoTestbed(Exception):
    """Emulated hosts are not possible here; the message says why."""


def add_host_options(parser: argparse.ArgumentParser, hosts: int | None, hosts_help: str) -> None:
    add = parser.add_argument_group("hosts and ranks").add_argument
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks on this machine, without emulated hosts; this is the default, with 2 ranks",
    )
    add("--ranks-per-host", type=int, metavar="R", help="ranks on each emulated host; needs root")
    add("--hosts", type=int, default=hosts, metavar="K", help=hosts_help)
    add(
        "--rate",
        default="1gbit",
        help="rate of each emulated interface in each direction, in the notation of tc; "
        "default: 1gbit",
    )
    add("--nics", type=int, default=1, help="interfaces of each emulated host; default: 1")


def add_other_build(add: argparse._ActionsContainer) -> None:
    add.add_argument("--other-build", type=Path, metavar="TREE", help=OTHER_BUILD_HELP)


def figure_path(text: str) -> Path:
    """The file of a figure; refused, before anything is measured, where it can't be drawn."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a figure needs matplotlib: pip install 'deepspeed-smddp[plots]'"
        )
    return Path(text)


def add_output_options(parser: argparse.ArgumentParser, rows: str) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    group.add_argument("--csv", type=Path, help=rows)
    group.add_argument("--figure", type=figure_path, help="file for the figure: PNG, PDF or SVG")
    group.add_argument(
        "--folder",
        type=figure_path,
        help="write CSV, figure and a page of the form in benchmarks/results into this folder, "
        "such as benchmarks/results/DATE-WHAT; --csv and --figure name other files",
    )
    return group


def layout(args: argparse.Namespace) -> str:
    """A file name for results on these hosts and ranks."""
    if not args.emulated:
        return f"{args.ranks_per_host}-ranks" if args.hosts == 1 else f"{args.hosts}-hosts-by-name"
    nics = f"-{args.nics}-nics" if args.nics > 1 else ""
    return f"{args.hosts}x{args.ranks_per_host}{nics}"


def name_outputs(args: argparse.Namespace, name: str) -> None:
    """With ``folder``, sets ``csv`` and ``figure`` unless they are given."""
    args.name = name
    if args.folder is not None:
        args.csv = args.csv or args.folder / f"{name}.csv"
        args.figure = args.figure or args.folder / f"{name}.png"


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=160)


def progress_bar(console: Console, width: int) -> Progress:
    """``width``: columns of the description."""
    return Progress(
        TextColumn(f"{{task.description:{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def open_hosts(args: argparse.Namespace, folder: Path) -> Iterator[HostSet]:
    """
    Raises:
        NoTestbed: if emulated hosts are asked for and not possible.
    """
    if not args.emulated:
        yield ThisMachine(args.hosts, args.ranks_per_host, folder)
        return
    made = make_testbed(args.hosts, args.rate, args.nics)
    if isinstance(made, str):
        raise NoTestbed(made)
    with made as bed:
        yield EmulatedHosts(bed, args.ranks_per_host, folder)
