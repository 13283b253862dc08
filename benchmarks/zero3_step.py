"""A ZeRO-3 training step over smddp beside the same step over Gloo, in turns: A B C A B C.

README.md says what is measured, and how.

Between emulated hosts, each with network interfaces of a given rate (needs root):

    python benchmarks/zero3_step.py --hosts 2 --ranks-per-host 1 --rate 1gbit \\
        --csv runs/zero3-2x1.csv --figure runs/zero3-2x1.png

Inside one host:

    python benchmarks/zero3_step.py --ranks 2 --csv runs/zero3-host.csv

This build and an earlier one, in turns:

    python benchmarks/zero3_step.py --ranks 2 --peers none --other-build ../before

The figure and the tables of several runs:

    python benchmarks/zero3_step.py --show runs/zero3-*.csv --figure runs/zero3.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
from steps import command
from steps.trainers import ZeroTrainers
from steps.workload import WORKLOADS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, WORKLOADS)
    parser.add_argument(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed settings (JSON or hjson) that override the built-in ones, section by "
        'section, for all backends; only smddp reads the section "smddp"',
    )
    return parser


def read_config(path: Path, parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    try:
        found = hjson.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--ds-config {path}: {error}")
    if not isinstance(found, Mapping):
        parser.error(f"--ds-config {path} does not hold an object of settings")
    return dict(found)


def main() -> int:
    parser = make_parser()

    def trainers(args: argparse.Namespace) -> list[ZeroTrainers]:
        over = read_config(args.ds_config, parser) if args.ds_config else {}
        load, threads = command.workload(args, WORKLOADS), command.threads(args)
        return [
            ZeroTrainers(name, build, load, over, args.device, threads)
            for name, build in command.backends(args)
        ]

    return command.main(parser, trainers)


if __name__ == "__main__":
    sys.exit(main())
