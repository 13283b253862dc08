"""Collectives of smddp beside those of its peers, in the same run, in turns: A B C A B C.

README.md says what is measured, and how.

On this machine, between ranks of one host, without a network and without special rights:

    python benchmarks/collectives.py --ranks 2 --peers copy,gloo,mpich,openmpi \\
        --sizes 1K,64K,1M..256M --csv runs/host-2.csv --figure runs/host-2.png

Between emulated hosts, each with network interfaces of a given rate (needs root):

    python benchmarks/collectives.py --hosts 2 --ranks-per-host 4 --rate 1gbit \\
        --peers gloo,mpich,openmpi --sizes 4K..64M --csv runs/hosts.csv --figure runs/hosts.png

As several hosts by name only, whose ranks use libfabric over this machine's loopback:

    python benchmarks/collectives.py --hosts 2 --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hosts.plan import ALL_OPS, BYTES_OF, COALESCED, OPS, parse_sizes

PEERS = ("smddp-shared", "copy", "fake", "gloo", "mpich", "mpich-ucx", "impi", "openmpi", "oneccl")
ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("what runs where").add_argument
    add("--ranks", type=int, metavar="N", help="on this machine as it is; the default, with 2")
    add(
        "--ranks-per-host",
        type=int,
        metavar="R",
        help="on emulated hosts; with --hosts 1 as --ranks",
    )
    add("--hosts", type=int, metavar="K", help="default: 1, or 2 if they are emulated")
    add("--rate", default="1gbit", help="of each emulated interface, each way, as tc writes it")
    add("--nics", type=int, default=1, help="emulated interfaces per host")

    add = parser.add_argument_group("who takes part").add_argument
    add(
        "--peers",
        help=f"of {', '.join(PEERS)}; 'none' for smddp alone; 'fetched' for copy, gloo and those "
        "that peers.py fetched. copy: the least that a host's memory asks of anybody; fake: "
        "torch's backend that does nothing, for calls of up to 4 KiB; smddp-shared: the core with "
        "its buffers in memory that the ranks share. Default: gloo",
    )
    add(
        "--from",
        dest="source",
        choices=("core", "torch", "both", "none"),
        default="both",
        help="smddp called from C++ (competitor smddp), from torch (smddp-torch), or both",
    )
    add("--core", type=Path, default=ROOT / "build/benchmarks/core_collectives", metavar="PROGRAM")
    add("--peers-folder", type=Path, default=ROOT / "benchmarks/.peers", metavar="FOLDER")

    add = parser.add_argument_group("what is measured").add_argument
    add("--sizes", help="bytes of the whole, with K, M or G; 4K..64M is every fourfold step")
    add(
        "--ops",
        default=",".join(OPS),
        help=f"of {', '.join(ALL_OPS)}; {COALESCED} is one coalesced call on 64 tensors of 1 KiB "
        "to 4 MiB, with one on a single tensor of as many bytes beside it",
    )
    add(
        "--dtypes",
        help=f"of {', '.join(BYTES_OF)}, for all operations. Default: both with --ranks; between "
        "emulated hosts fp32 is gathered and bf16 is summed",
    )
    add("--turns", type=int, default=5, help="timed turns of each competitor")
    add("--seconds-per-turn", type=float, metavar="S", help="default: 0.5; 1 with emulated hosts")
    add(
        "--short",
        action="store_true",
        help="three sizes, bf16, three short turns, beside all peers that are there: a minute",
    )

    add = parser.add_argument_group("what is written").add_argument
    add("--csv", type=Path, help="all figures")
    add("--figure", type=Path, help="the figure, as PNG, PDF or SVG")
    add("--resume", type=Path, metavar="CSV", help="add to this file what it lacks")
    return parser


def fetched(folder: Path) -> list[str]:
    found = [p for p in PEERS if list((folder / p).glob("*_collectives"))]
    return ["copy", "gloo", *found]


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the options and fills in what depends on others."""
    if args.ranks is not None and args.ranks_per_host is not None:
        parser.error("--ranks is for this machine, --ranks-per-host for emulated hosts")
    args.emulated = args.ranks_per_host is not None and args.hosts != 1
    args.hosts = args.hosts or (2 if args.emulated else 1)
    if args.ranks_per_host is None:
        args.ranks = args.ranks or 2
        if args.hosts < 1 or args.ranks % args.hosts:
            parser.error(f"--ranks {args.ranks} can't be dealt out to --hosts {args.hosts} evenly")
        args.ranks_per_host = args.ranks // args.hosts
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


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    complete(args, parser)
    from hosts.run import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
