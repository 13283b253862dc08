"""AllGathers of two ranks of one host after both have slept.

    python benchmarks/after_idle.py --csv after-idle.csv

Each turn starts the ranks anew in each mode: as they are, and bound to a core each. A rank sleeps,
then times a thousand calls from torch, several times. One row
for each series of calls: turn, mode, microseconds of a call on rank 0.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODES = ("free", "bound")
CALLS, SERIES, WARM_UP = 1000, 12, 200
SLEEP_SECONDS = 0.6


def rank_main(mode: str, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    import deepspeed_smddp  # noqa: F401

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if mode == "bound":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("smddp")
    shard = torch.ones(nbytes // 4 // dist.get_world_size())
    gathered = torch.empty(nbytes // 4)
    for _ in range(WARM_UP):
        dist.all_gather_into_tensor(gathered, shard)
    for _ in range(SERIES):
        time.sleep(SLEEP_SECONDS)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            dist.all_gather_into_tensor(gathered, shard)
        if rank == 0:
            print(f"{(time.perf_counter() - began) / CALLS * 1e6:.2f}", flush=True)
    dist.destroy_process_group()


def start(mode: str, nbytes: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += [str(Path(__file__).resolve()), "--rank-mode", mode, "--bytes", str(nbytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, help="where the rows go")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=64 << 10, help="of the output")
    parser.add_argument("--rank-mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_mode:
        rank_main(args.rank_mode, args.bytes)
        return
    rows = []
    for turn in range(args.turns):
        for mode in MODES:
            rows += [(turn, mode, us) for us in start(mode, args.bytes)]
    for mode in MODES:
        of_mode = sorted(us for _, of, us in rows if of == mode)
        least, most = of_mode[0], of_mode[-1]
        print(f"{mode}: {statistics.median(of_mode):.1f} us ({least:.1f} to {most:.1f})")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("turn", "mode", "us"), *rows])


if __name__ == "__main__":
    main()
