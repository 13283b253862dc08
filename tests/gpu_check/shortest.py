"""One rank of the shortest program that uses each collective on a device once.

python -m gpu_check.shortest RENDEZVOUS cuda|host, with RANK and WORLD_SIZE
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

import deepspeed_smddp
from gpu_check import place
from gpu_check.ranks import OURS
from harness.worker import Context


def main() -> None:
    """Runs the rank; an error ends it with a stack."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place.settle(Context(rank, "A" * size, "smddp"), sys.argv[2])
    deepspeed_smddp.configure(routes=OURS)
    dist.init_process_group(
        "smddp", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size
    )
    here = place.here()
    part, whole = here.empty(9457), here.empty(9457 * size)
    part.fill_(rank + 1)
    place.gather(whole, part).wait()
    here.synchronize()
    assert whole.view(size, -1)[:, -1].tolist() == list(range(1, size + 1))
    place.scatter(part, whole).wait()
    place.reduce(part).wait()
    here.synchronize()
    assert part[-1].item() == size * sum(range(1, size + 1))
    dist.destroy_process_group()
    print(f"rank {rank}: three collectives, right results")


if __name__ == "__main__":
    main()
