"""Coding between hosts, from Python: the same bits as Gloo moves, in fewer bytes; the setting."""

from __future__ import annotations

import json

import pytest

import ranks

PROGRAM = """
import json, os
import torch, torch.distributed as dist
import deepspeed_smddp

rank = int(os.environ["RANK"])
os.environ["SMDDP_HOST_ID"] = os.environ["LAYOUT"][rank]
dist.init_process_group("smddp")
gloo = dist.new_group(backend="gloo")
size = dist.get_world_size()
torch.manual_seed(rank)


def bits(tensor):
    return tensor.view(torch.uint8)


for kind in (torch.bfloat16, torch.float16, torch.float32):
    for fill in ("weights", "bits"):
        part = torch.empty(1_000_003, dtype=kind).normal_(0, 0.02)
        if fill == "bits":
            bits(part).random_()
        ours, theirs = (torch.empty(size * len(part), dtype=kind) for _ in range(2))
        dist.all_gather_into_tensor(ours, part)
        dist.all_gather_into_tensor(bits(theirs), bits(part), group=gloo)
        assert torch.equal(bits(ours), bits(theirs)), (kind, fill)
    if size == 2:
        ours, theirs = part.clone().normal_(), torch.empty_like(part)
        theirs.copy_(ours)
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        assert torch.equal(bits(ours), bits(theirs)), kind
rows = deepspeed_smddp.statistics()
(row,) = (row for row in rows if row["collective"] == "all_gather")
print(json.dumps([row["sent_bytes"], row["sent_raw_bytes"]]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("layout", ["AB", "AABB"])
@pytest.mark.parametrize("coding", ["on", "off", "auto"])
def test_the_bits_are_those_of_gloo(layout: str, coding: str) -> None:
    slow = "curve=20:4:0.1"  # GB/s
    env = {"LAYOUT": layout, "SMDDP_CODING": coding, "SMDDP_DEBUG": slow}
    outputs = ranks.run(PROGRAM, len(layout), env=env, timeout=120)
    # Half of the bytes are random bits.
    sent, raw = json.loads(outputs[0].splitlines()[-1])
    assert raw > 6_000_000
    assert sent < 0.93 * raw if coding != "off" else sent == raw
