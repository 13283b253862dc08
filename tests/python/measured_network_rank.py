"""One rank of test_measured_network: makes the default group and one more, and tells of them.

Once for each line of standard input, a list of the curve for SMDDP_DEBUG ("" for none): each
job's rank is forked from this process, which has imported torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys

import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import backend


def tell(curve: str, gathers: int = 0) -> None:
    """``gathers`` AllGathers of 2 MiB of each rank come before the second group is made."""
    if curve:
        os.environ["SMDDP_DEBUG"] = f"curve={curve}"
    dist.init_process_group("smddp")
    mine = torch.randint(1 << 62, (1 << 18,))
    for _ in range(gathers):
        dist.all_gather_into_tensor(
            torch.empty(dist.get_world_size() << 18, dtype=mine.dtype), mine
        )
    dist.new_group()
    dist.all_reduce(torch.ones(1000))
    states = backend.states()
    networks, sources = ([state[key] for state in states] for key in ("network", "network_source"))
    dist.destroy_process_group()
    print(json.dumps({"networks": networks, "sources": sources}), end="", flush=True)


gc.collect()
gc.freeze()  # the jobs' garbage collections leave what was imported alone
for line in sys.stdin:
    job = os.fork()
    if job == 0:
        tell(*json.loads(line))
        sys.exit()
    if status := os.waitpid(job, 0)[1]:
        sys.exit(os.waitstatus_to_exitcode(status))
    print(flush=True)  # the end of the answer: the store of this job is gone
