"""Collectives of smddp beside those of its peers, in the same run, in turn: A B A B.

Between emulated hosts, each with network interfaces of a given rate (needs root; README.md says
what is measured):

    python benchmarks/collectives.py --hosts 2 --ranks-per-host 4 --rate 1gbit \\
        --peers gloo,mpich,openmpi --sizes 4K..64M --csv runs/hosts.csv --figure runs/hosts.png

Or beside Gloo on this machine's loopback, with any number of ranks:

    python benchmarks/collectives.py --ranks 2 --sizes 1K,64K,1M,16M --csv runs/bench.csv
    python benchmarks/collectives.py --hosts 2 --ranks 2     # two hosts, over libfabric
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hosts.plan import OPS, parse_sizes

DTYPES = ("fp32", "bf16", "fp16")
PEERS = ("gloo", "mpich", "mpich-ucx", "impi", "openmpi", "oneccl")
ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, help="default: 1 on loopback, 2 emulated")
    add("--sizes", help="bytes of the whole, with K, M or G; 4K..64M is every fourfold step")
    add("--ops", default=",".join(OPS))
    add("--turns", type=int, default=5, help="timed turns of each competitor")
    add("--csv", type=Path, help="write all figures there")
    add("--short", action="store_true", help="three sizes, three turns: about a minute")

    loopback = parser.add_argument_group("on loopback").add_argument
    loopback("--ranks", type=int, help="of all hosts together; default 2")
    loopback("--dtypes", default="fp32,bf16")

    hosts = parser.add_argument_group("between emulated hosts").add_argument
    hosts("--ranks-per-host", type=int, metavar="R", help="this option chooses emulated hosts")
    hosts("--rate", default="1gbit", help="of each interface, each way, as tc writes it")
    hosts("--nics", type=int, default=1, help="interfaces per host")
    hosts("--peers", default="gloo", help=f"of {','.join(PEERS)}; 'none' for smddp alone")
    hosts(
        "--from",
        dest="source",
        choices=("core", "torch", "both"),
        default="both",
        help="smddp called from C++ (competitor smddp), from torch (smddp-torch), or both",
    )
    hosts("--seconds-per-turn", type=float, default=1.0, metavar="S")
    hosts("--figure", type=Path, help="draw the figure there")
    hosts("--resume", type=Path, metavar="CSV", help="add to this file what it lacks")
    hosts("--core", type=Path, default=ROOT / "build/benchmarks/core_collectives")
    hosts("--peers-folder", type=Path, default=ROOT / "benchmarks/.peers")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    emulated = args.ranks_per_host is not None
    if emulated and args.ranks is not None:
        parser.error("--ranks counts ranks on loopback; emulated hosts take --ranks-per-host")
    if args.short:
        args.sizes, args.turns, args.dtypes = "1K,1M,16M", 3, "bf16"
        args.seconds_per_turn = 0.5
    try:
        args.sizes = parse_sizes(args.sizes or ("4K..64M" if emulated else "1K,64K,1M,16M,64M"))
    except ValueError:
        parser.error(f"--sizes {args.sizes}: write bytes as 4K, 64M or 4K..64M")
    args.ops, args.dtypes = args.ops.split(","), args.dtypes.split(",")
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    for given, known in ((args.ops, OPS), (args.dtypes, DTYPES), (args.peers, PEERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if emulated:
        from hosts.run import run as run_hosts

        args.hosts = args.hosts or 2
        return run_hosts(args)
    args.ranks, args.hosts = args.ranks or 2, args.hosts or 1
    if not 1 <= args.hosts <= args.ranks:
        parser.error(f"--hosts {args.hosts} needs at least as many ranks; --ranks is {args.ranks}")
    from loopback import run as run_loopback

    return run_loopback(args)


if __name__ == "__main__":
    sys.exit(main())
