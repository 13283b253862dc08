"""A step of DDP or FSDP2 over smddp beside the same step over Gloo, in turns: A B C A B C.

README.md says what is measured, and how.

Between emulated hosts, each with network interfaces of a given rate (needs root):

    python benchmarks/data_parallel_step.py --scheme DDP --hosts 2 --ranks-per-host 2 \\
        --rate 1gbit --csv runs/ddp-2x2.csv --figure runs/ddp-2x2.png

Inside one host:

    python benchmarks/data_parallel_step.py --scheme FSDP2 --ranks 2 --csv runs/fsdp2-host.csv

The figure and the tables of several runs:

    python benchmarks/data_parallel_step.py --show runs/*-2x?.csv --figure runs/data-parallel.png
"""

from __future__ import annotations

import argparse
import sys

from steps import command
from steps.data_parallel import DDP, FSDP2, WORKLOADS, DataParallelTrainers, Options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, WORKLOADS, devices=("cpu",))
    parser.add_argument("--scheme", choices=(DDP, FSDP2), default=DDP, help="default: DDP")
    parser.add_argument(
        "--bucket-mb",
        type=float,
        metavar="MiB",
        help="bucket_cap_mb of DDP, for all backends; default: DDP's own",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of DDP's parameters and gradients; default: float32",
    )
    return parser


def trainers(args: argparse.Namespace) -> list[DataParallelTrainers]:
    load = command.workload(args, WORKLOADS)
    options = Options(args.scheme, args.bucket_mb, args.dtype)
    return [
        DataParallelTrainers(name, build, load, options, command.threads(args))
        for name, build in command.backends(args)
    ]


if __name__ == "__main__":
    sys.exit(command.main(make_parser(), trainers))
