"""A rank that computes and gathers in turns until rank 0 says stop.

    slow_rank.py KIB COMPUTE_SECONDS BURNING_RANK BURN_SECONDS

One rank keeps its processor busy for longer than the others compute. Rank 0 stops when its standard
input ends; every rank prints what it has counted of the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

import deepspeed_smddp


def main() -> None:
    kib, compute, burning, burn = (float(text) for text in sys.argv[1:5])
    dist.init_process_group("smddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    stop = threading.Event()
    if rank == 0:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    part = torch.ones(int(kib * 1024), dtype=torch.uint8)
    whole = torch.empty(size * part.numel(), dtype=torch.uint8)
    flag = torch.zeros(1)
    print("ready", flush=True)
    while not flag.item():
        time.sleep(compute)
        end = time.monotonic() + (burn if rank == burning else 0.0)
        while time.monotonic() < end:
            pass
        dist.all_gather_into_tensor(whole, part)
        flag.fill_(float(stop.is_set()))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    print(json.dumps(deepspeed_smddp.peer_statistics()), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # the thread that reads standard input would hold the end up


if __name__ == "__main__":
    main()
