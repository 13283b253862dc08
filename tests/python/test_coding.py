"""Coding between hosts, from Python: the bits that went in, also over Gloo, in fewer bytes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note
from hypothesis import strategies as st

import ranks
from deepspeed_smddp import _C
from harness import model
from harness.worker import Context
from harness.world import Pool

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


KINDS = (torch.bfloat16, torch.float16, torch.float32)
MOST = (1 << 20) + 3  # bytes and elements
_near = st.builds(
    lambda base, delta: base + delta,
    st.sampled_from([2048, 4096, 8192, 16384, 32768, 65536, 1 << 18, 1 << 20]),
    st.integers(-3, 3),
)


def values(kind: torch.dtype, fill: str, share: float, numel: int, seed: int) -> torch.Tensor:
    """Normal values, of which a share are what ``fill`` says."""
    random = torch.Generator().manual_seed(seed)
    made = torch.empty(numel, dtype=kind).normal_(0, 0.02, generator=random)
    bits = {2: torch.int16, 4: torch.int32}[kind.itemsize]
    info, width = torch.iinfo(bits), {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[kind]
    other = torch.randint(info.min, info.max + 1, (numel,), generator=random).to(bits)
    mantissa, sign = (1 << width) - 1, torch.tensor(info.min, dtype=bits)
    if fill == "zeros":  # of both signs
        other &= sign
    elif fill == "denormals":
        other &= sign | mantissa
    elif fill == "infinities":
        other = (other & sign) | (info.max & ~mantissa)
    elif fill == "nans":
        other |= (info.max & ~mantissa) | 1
    chosen = torch.rand(numel, generator=random) < share
    return torch.where(chosen, other, made.view(bits)).view(kind)


def moved(ctx: Context, collective: str, parts: list[list[torch.Tensor]]) -> None:
    """``parts``: those of each rank, for tensors of one call. Each must arrive as it was."""
    mine, others = parts[ctx.rank], parts[1 - ctx.rank]
    if collective == "broadcast":
        for number, part in enumerate(mine):
            dist.broadcast(part, number % 2)
            assert model.same_bits(part, parts[number % 2][number])
    elif collective == "all_to_all":
        for part, theirs in zip(mine, others, strict=True):
            got = torch.empty(2 * len(part), dtype=part.dtype)
            dist.all_to_all_single(got, torch.cat([part, part]))
            assert model.same_bits(got[ctx.rank * len(part) :][: len(part)], part)
            assert model.same_bits(got[(1 - ctx.rank) * len(part) :][: len(part)], theirs)
    elif collective == "all_gather":
        got = [torch.empty(2 * len(part), dtype=part.dtype) for part in mine]
        with dist.distributed_c10d._coalescing_manager():
            for out, part in zip(got, mine, strict=True):
                dist.all_gather_into_tensor(out, part)
        for out, first, second in zip(got, *parts, strict=True):
            assert model.same_bits(out, torch.cat([first, second]))
    else:  # rank 1 has the numbers of rank 0's block, and the other way round
        got = [torch.empty_like(part) for part in mine]
        with dist.distributed_c10d._coalescing_manager():
            for out, part in zip(got, mine, strict=True):
                blocks = [torch.full_like(part, -0.0), part]  # -0 changes no number
                dist.reduce_scatter_tensor(
                    out, torch.cat(blocks if ctx.rank == 0 else blocks[::-1])
                )
        for out, theirs in zip(got, others, strict=True):
            number = ~theirs.isnan()
            assert model.same_bits(out[number], theirs[number]) and bool(out[~number].isnan().all())


def arrives(
    ctx: Context,
    collective: str,
    kind: torch.dtype,
    numels: list[int],
    fill: str,
    share: float,
    seed: int,
) -> None:
    moved(
        ctx,
        collective,
        [
            [values(kind, fill, share, n, seed + 10 * rank + i) for i, n in enumerate(numels)]
            for rank in range(2)
        ],
    )


@given(
    collective=st.sampled_from(["all_gather", "reduce_scatter", "broadcast", "all_to_all"]),
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.one_of(st.integers(0, MOST), _near), min_size=1, max_size=3),
    fill=st.sampled_from(["bits", "zeros", "denormals", "infinities", "nans"]),
    share=st.sampled_from([0.0, 0.002, 0.1, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_any_bits_arrive(
    worlds: Pool,
    collective: str,
    kind: torch.dtype,
    sizes: list[int],
    fill: str,
    share: float,
    seed: int,
) -> None:
    numels = [min(size // kind.itemsize + size % 4, MOST) for size in sizes]
    note(f"{collective} {kind} x {numels}, {share} of them {fill}, seed {seed}")
    world = worlds("AB", env={"SMDDP_CODING": "on"})
    world.run(arrives, collective, kind, numels, fill, share, seed, timeout=30)
