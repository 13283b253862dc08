"""What the flight recorder costs in a ZeRO-3 step: it is switched off and on from step to step.

One process group, the same memory, the same cores: what differs between launches differs for both.

    torchrun --standalone --nproc-per-node 2 benchmarks/recorder_step.py --turns 500 --csv steps.csv

A turn is four steps: off, on, on, off, or on, off, off, on, one after the other. A step's time is
that of the slowest rank, between two barriers. What is printed is the median of the turns' ratios,
on to off, with its interval of 95 %, from 2,000 bootstrap samples of the turns (Efron, "Bootstrap
methods: another look at the jackknife", 1979).
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from steps.command import DIMENSIONS
from steps.workload import WORKLOADS, deepspeed_config, resized
from zero3_rank import ZeroTraining

ORDERS = ((False, True, True, False), (True, False, False, True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=500, help="turns of four steps; default: 500")
    parser.add_argument("--csv", type=Path, required=True, help="the milliseconds of each step")
    parser.add_argument("--config", choices=tuple(WORKLOADS), default=next(iter(WORKLOADS)))
    for name in DIMENSIONS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help="replaces the configuration's")
    return parser.parse_args()


def milliseconds(training: ZeroTraining) -> float:
    dist.barrier()
    start = time.perf_counter()
    training.step()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item() * 1e3


def summary(rows: np.ndarray) -> str:
    """``rows``: [turn, (off, off, on, on)] in milliseconds."""
    off, on = rows[:, :2].mean(axis=1), rows[:, 2:].mean(axis=1)
    ratios = on / off
    random = np.random.default_rng(1)
    samples = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(samples, (2.5, 97.5))
    return (
        f"{len(rows)} turns: step {np.median(off):.3f} ms without the recorder, "
        f"{np.median(on):.3f} ms with it; on / off {np.median(ratios):.4f} "
        f"({low:.4f} to {high:.4f})"
    )


def main() -> int:
    args = arguments()
    load = resized(WORKLOADS[args.config], **{name: getattr(args, name) for name in DIMENSIONS})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = deepspeed_config(load, "smddp", {"bf16": {"enabled": False}})
    training = ZeroTraining(load, "smddp", config)
    from deepspeed_smddp import _C

    for _ in range(10):
        milliseconds(training)
    for on in (False, True):
        _C.set_recording(on)
        newest = _C.flight_record()[-1]["id"]
        milliseconds(training)
        recorded = _C.flight_record()[-1]["id"] - newest
        assert (recorded > 0) == on, f"{recorded} operations were recorded"
    rows = []
    for turn in range(args.turns):
        times: dict[bool, list[float]] = {False: [], True: []}
        for on in ORDERS[turn % 2]:
            _C.set_recording(on)
            times[on].append(milliseconds(training))
        rows.append([*times[False], *times[True]])
        if training.rank == 0 and turn % max(1, args.turns // 20) == 0:
            print(f"turn {turn} of {args.turns}", file=sys.stderr)
    if training.rank == 0:
        with args.csv.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(("off_1_ms", "off_2_ms", "on_1_ms", "on_2_ms"))
            out.writerows([[f"{each:.4f}" for each in row] for row in rows])
        print(
            f"{training.parameters:,} parameters, {recorded} operations. {summary(np.array(rows))}"
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
