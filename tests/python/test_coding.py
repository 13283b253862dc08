"""Coding between hosts, from Python: the same bits as Gloo moves, in fewer bytes; the setting."""

from __future__ import annotations

import json

import pytest
import torch

import ranks
from deepspeed_smddp import _C

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
from deepspeed_smddp import _C
answer = _C.group_states()[0]["coding"]
print(json.dumps([row["sent_bytes"], row["sent_raw_bytes"], answer]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("layout", ["AB", "AABB"])
@pytest.mark.parametrize("coding", ["on", "off", "auto"])
def test_the_bits_are_those_of_gloo(layout: str, coding: str) -> None:
    slow = "curve=20:4:0.1"  # GB/s
    env = {"LAYOUT": layout, "SMDDP_CODING": coding, "SMDDP_DEBUG": slow}
    outputs = ranks.run(PROGRAM, len(layout), env=env, timeout=120)
    # Half of the bytes are random bits.
    sent, raw, answer = json.loads(outputs[0].splitlines()[-1])
    assert raw > 6_000_000
    assert sent < 0.93 * raw if coding != "off" else sent == raw
    if coding != "auto":
        assert answer["answers"] == 0
        return
    # The last large tensor had random bits, or sums of normally distributed values.
    assert answer["answers"] > 0 and answer["pays"] == (answer["ratio"] < 0.9)
    assert answer["network"] == pytest.approx(1e8 * 2 / len(layout)) and answer["code"] > 1e8


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [(torch.bfloat16, 0.69, 0.73), (torch.float32, 0.84, 0.88), (torch.int32, 1, 1)],
)
def test_how_far_a_tensor_shrinks(kind: torch.dtype, low: float, high: float) -> None:
    values = torch.empty(100_001).normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    found = _C.measure_coding(values.to(kind))
    assert low <= found["sent_bytes"] / values.to(kind).nbytes <= high
    assert found["encode_seconds"] > 0 and found["decode_seconds"] > 0
    bits = torch.empty(100_001, dtype=torch.int32).random_().view(torch.float32)
    assert _C.measure_coding(bits)["sent_bytes"] == bits.nbytes
    with pytest.raises(ValueError, match="contiguous"):
        _C.measure_coding(values[::2])
