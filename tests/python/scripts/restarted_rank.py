"""One rank of a job over a store that outlives it, as torchrun's does when it restarts ranks."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    port, rank, size = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("smddp", store=store, rank=rank, world_size=size)
    values = torch.full((3,), float(rank))
    dist.all_reduce(values)
    for group in (None, dist.new_group()):  # by Gloo
        root = torch.full((3,), 7.0 if rank == 0 else 0.0)
        dist.broadcast(root, 0, group=group)
        assert root.tolist() == [7.0] * 3
    print("sum", int(values[0]), flush=True)
    os._exit(0)  # leaves the groups as a killed process does


if __name__ == "__main__":
    main()
