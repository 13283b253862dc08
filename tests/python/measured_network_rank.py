"""One rank of test_measured_network: makes the default group and one more, and tells of them."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from deepspeed_smddp import group_states

began = time.perf_counter()
dist.init_process_group("smddp")
made = time.perf_counter() - began
began = time.perf_counter()
second = dist.new_group()
again = time.perf_counter() - began
dist.all_reduce(torch.ones(1000))
states = group_states.states()
networks, sources = ([state[key] for state in states] for key in ("network", "network_source"))
print(json.dumps({"networks": networks, "sources": sources, "seconds": made, "again": again}))
dist.destroy_process_group()
