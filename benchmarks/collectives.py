"""Collectives of smddp beside those of its peers, in one run, in turns: A B C A B C.

README.md says what is measured, and how.

On this machine, between ranks of one host, without a network and without special rights:

    python benchmarks/collectives.py --ranks 2 --peers copy,gloo,mpich,openmpi \\
        --sizes 1K,64K,1M..256M --csv runs/host-2.csv --figure runs/host-2.png

Between emulated hosts, whose network interfaces have a given rate (needs root):

    python benchmarks/collectives.py --hosts 2 --ranks-per-host 4 --rate 1gbit \\
        --peers gloo,mpich,openmpi --sizes 4K..64M --csv runs/hosts.csv --figure runs/hosts.png

As several hosts by name only, whose ranks use libfabric over the loopback of this machine:

    python benchmarks/collectives.py --hosts 2 --ranks 2

This build and an earlier one, in turns:

    python benchmarks/collectives.py --ranks 2 --peers none --other-build ../before
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from calls.cases import ALL_OPS, BYTES_OF, COALESCED, FROM_TORCH_ALONE, MESSAGE, OPS, parse_sizes
from shared.command_line import add_host_options, add_other_build, add_output_options
from shared.host_set import ROOT

PEERS = (
    "smddp-shared",
    "smddp-async",
    "smddp-coded",
    "smddp-direct",
    "smddp-log",
    "smddp-joint",
    "smddp-slots",
    "smddp-reads",
    "copy",
    "sockets",
    "sockets-doubling",
    "fake",
    "gloo",
    "mpich",
    "mpich-ucx",
    "impi",
    "openmpi",
    "oneccl",
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts_help = "number of hosts; default: 1, or 2 if they are emulated"
    add_host_options(parser, hosts=None, hosts_help=hosts_help)
    add_competitors(parser)
    add_measurement(parser)
    add = add_output_options(parser, rows="file for all figures, one row per case and competitor")
    add.add_argument(
        "--resume", type=Path, metavar="CSV", help="measure what this file lacks, and add it there"
    )
    return parser


def add_competitors(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("competitors")
    add = group.add_argument
    add(
        "--peers",
        help=f"competitors of smddp, of {', '.join(PEERS)}; 'none': smddp alone; 'fetched': copy, "
        "gloo and those that peers.py compiled. copy: the least time that the memory of a host "
        "allows; sockets, sockets-doubling: plain TCP sockets between hosts; "
        "fake: torch's backend that does nothing, for calls of up to 4 KiB; smddp-shared: "
        "the core with its buffers in memory that the ranks share; smddp-async: the core with "
        "callers that do not wait in it; smddp-coded: with coding where it pays; smddp-direct, "
        "smddp-log, smddp-joint: the core with this pattern between hosts in place of the "
        "selector's choice; smddp-slots, smddp-reads: the core that copies through slots, or reads "
        "the memory of the host's other ranks, whatever costs less. Default: gloo",
    )
    add(
        "--from",
        dest="source",
        choices=("core", "torch", "both", "none"),
        default="both",
        help="how smddp is called: from C++ (competitor smddp), from torch (smddp-torch), both, or "
        "not at all; default: both",
    )
    add("--core", type=Path, metavar="PROGRAM", help="the program core_collectives of this build")
    add("--peers-folder", type=Path, default=ROOT / "benchmarks/.peers", metavar="FOLDER")
    add_other_build(group)


def add_measurement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--sizes",
        help="bytes of AllGather's output, ReduceScatter's input, AllReduce's buffer, with K, M or "
        "G; 4K..64M is every fourfold step",
    )
    add(
        "--ops",
        default=",".join(OPS),
        help=f"operations, of {', '.join(ALL_OPS)}; {COALESCED} is one coalesced call on 64 "
        "tensors of 1 KiB to 4 MiB, compared with a call on a single tensor of as many bytes; "
        f"{MESSAGE}: between rank r and rank r + half of the ranks, the other way at each call; "
        f"{', '.join(FROM_TORCH_ALONE)}: from torch only, beside gloo",
    )
    add(
        "--dtypes",
        help=f"types, of {', '.join(BYTES_OF)}, for all operations. Default: both with --ranks; "
        "between emulated hosts fp32 for AllGather and bf16 for sums",
    )
    add(
        "--data",
        choices=("zeros", "weights", "random", "trained-weights", "trained-gradients"),
        default="zeros",
        help="what the core's timed calls move: zeros, normally distributed values, random bits, "
        "or those of a small transformer that is trained first, for about a minute (trained.py)",
    )
    add("--turns", type=int, default=5, help="timed turns of each competitor; default: 5")
    add(
        "--seconds-per-turn",
        type=float,
        metavar="S",
        help="default: 0.5; 1 between emulated hosts",
    )
    add(
        "--short",
        action="store_true",
        help="three sizes, bf16, three short turns, beside all peers that are compiled: a minute",
    )


def fetched(folder: Path) -> list[str]:
    found = [p for p in PEERS if list((folder / p).glob("*_collectives"))]
    return ["copy", "gloo", *found]


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options and fills in those that depend on others."""
    complete_hosts(args, parser)
    if args.short:
        args.sizes, args.turns = args.sizes or "1K,1M,16M", 3
        args.dtypes = args.dtypes or "bf16"
        args.seconds_per_turn = args.seconds_per_turn or 0.2
        args.peers = args.peers or "fetched"
    args.seconds_per_turn = args.seconds_per_turn or (1.0 if args.emulated else 0.5)
    sizes = args.sizes or ("4K..64M" if args.emulated else "1K,64K,1M,16M,64M")
    try:
        args.sizes = parse_sizes(sizes)
    except ValueError:
        parser.error(f"--sizes {sizes}: write bytes as 4K, 64M or 4K..64M")
    args.ops = args.ops.split(",")
    args.dtypes = (args.dtypes or ("" if args.emulated else "fp32,bf16")).split(",")
    args.dtypes = [dtype for dtype in args.dtypes if dtype]
    args.peers = (args.peers or "gloo").split(",")
    if args.peers == ["none"]:
        args.peers = []
    elif args.peers == ["fetched"]:
        args.peers = fetched(args.peers_folder)
    for given, known in ((args.ops, ALL_OPS), (args.dtypes, BYTES_OF), (args.peers, PEERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if MESSAGE in args.ops and args.hosts * args.ranks_per_host % 2:
        parser.error(f"{MESSAGE} needs an even number of ranks")


def complete_hosts(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.ranks is not None and args.ranks_per_host is not None:
        parser.error("--ranks is for this machine, --ranks-per-host for emulated hosts")
    args.emulated = args.ranks_per_host is not None and args.hosts != 1
    args.hosts = args.hosts or (2 if args.emulated else 1)
    if args.ranks_per_host is None:
        args.ranks = args.ranks or 2
        if args.hosts < 1 or args.ranks % args.hosts:
            parser.error(f"--ranks {args.ranks} can't be divided evenly over --hosts {args.hosts}")
        args.ranks_per_host = args.ranks // args.hosts


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    complete(args, parser)
    from calls.run import run

    with tempfile.TemporaryDirectory(prefix="smddp-trained-") as folder:
        if args.data != "zeros":
            os.environ["TURN_DATA"] = args.data  # turns.h
        if args.data.startswith("trained-"):
            import trained

            trained.write(Path(folder), trained.train()[0])
            os.environ["TURN_DATA"] = f"{folder}/{args.data.removeprefix('trained-')}"
        return run(args)


if __name__ == "__main__":
    sys.exit(main())
