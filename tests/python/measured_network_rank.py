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


def tell(curve: str) -> None:
    if curve:
        os.environ["SMDDP_DEBUG"] = f"curve={curve}"
    dist.init_process_group("smddp")
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
