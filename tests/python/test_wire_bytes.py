"""Bytes that cross the network, by the kernel's counters of the loopback device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed_smddp
from deepspeed_smddp import _C
from harness.worker import Context
from harness.world import BACKEND, Pool

COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")
SHARD = 8 << 20  # bytes

pytestmark = pytest.mark.alone  # every byte on the loopback device counts
needs_smddp = pytest.mark.skipif(BACKEND != "smddp", reason=f"the backend under test is {BACKEND}")


def gather_and_count(ctx: Context) -> tuple[int, list[str]]:
    """Bytes that left through loopback during one AllGather and one ReduceScatter, counted by a
    rank between two barriers."""
    shard = torch.full((SHARD // 4,), float(ctx.rank))
    whole = torch.empty(ctx.size * SHARD // 4)
    dist.barrier()
    deepspeed_smddp.reset_statistics()
    before = int(COUNTER.read_text())
    dist.barrier()  # no rank sends before every rank has read the counter
    dist.all_gather_into_tensor(whole, shard)
    dist.reduce_scatter_tensor(shard, whole)
    dist.barrier()
    sent = int(COUNTER.read_text()) - before
    return sent, [row["path"] for row in deepspeed_smddp.statistics()]


@needs_smddp
@pytest.mark.skipif(not COUNTER.exists(), reason=f"{COUNTER} does not exist here")
def test_shards_cross_the_network_only_between_hosts(worlds: Pool) -> None:
    alone, paths = worlds("AA").run(gather_and_count, timeout=60)[0]
    assert not any("fabric" in path for path in paths), paths
    # Other traffic of the machine over loopback must stay far below one shard meanwhile.
    assert alone < SHARD // 4
    for layout, crossings in (("AB", 2), ("AABB", 4)):
        sent, paths = worlds(layout).run(gather_and_count, timeout=60)[0]
        assert any("fabric" in path for path in paths), paths
        # Each rank's shard goes once to the other host, and each block's partial sum once.
        least = 2 * crossings * SHARD
        assert least <= sent < 1.2 * least, (layout, sent, least)


def gather_in_buckets(ctx: Context) -> dict[str, int]:
    _C.configure(allgather_bucket_elements=100_000)
    try:
        deepspeed_smddp.reset_statistics()
        shard = torch.full((400_000,), ctx.rank, dtype=torch.bfloat16)
        whole = torch.empty(ctx.size * 400_000, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, shard)
        for rank in range(ctx.size):
            assert (whole[rank * 400_000 : (rank + 1) * 400_000] == rank).all()
        (row,) = deepspeed_smddp.statistics()
        return {"rounds": row["rounds"], "largest_round": row["largest_round"]}
    finally:
        _C.configure()


@needs_smddp
@pytest.mark.parametrize("layout", ["AA", "AB", "AAB"])
def test_allgather_bucket_bounds_what_one_allgather_carries(worlds: Pool, layout: str) -> None:
    ranks = len(layout)
    for seen in worlds(layout).run(gather_in_buckets, timeout=60):
        assert 0 < seen["largest_round"] <= 2 * 100_000
        assert seen["rounds"] >= 400_000 * ranks / 100_000
