"""The arithmetic of sharding by degree, and its groups."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_smddp.deepspeed.sharding.shard_groups import (
    ReplicaAllReduce,
    ReplicasDiffer,
    Sharding,
)
from deepspeed_smddp.deepspeed.sharding.sharded_checkpoint import pieces
from deepspeed_smddp.deepspeed.sharding.sharding_degree import check_config, suggested_degree
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.intervals import union, without
from harness.worker import Context
from harness.world import Pool


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12))
def test_pieces_make_up_the_new_shards(elements: int, old_count: int, new_count: int) -> None:
    old_width, new_width = -(-elements // old_count), -(-elements // new_count)
    found: list[int] = []
    for rank in range(new_count):
        shard: dict[int, int] = {}
        for piece in pieces(elements, old_count, new_count, rank):
            assert 0 <= piece.old_rank < old_count
            assert piece.old_start + piece.length <= old_width
            for i in range(piece.length):
                shard[piece.new_start + i] = piece.old_rank * old_width + piece.old_start + i
        assert list(shard) == list(range(len(shard)))
        assert len(shard) <= new_width
        found += shard.values()
    assert found == list(range(elements))


@pytest.mark.parametrize(
    ("billions", "ranks", "per_host", "degree"),
    [
        (1.0, 64, 8, 8),  # one host
        (7.0, 64, 8, 32),  # three hosts of 8, and the next number that divides 8 hosts
        (7.0, 48, 8, 24),
        (30.0, 80, 8, 0),  # needs all ten hosts
        (30.0, 8, 8, 0),
        (0.1, 8, 8, 0),  # only one host
        (0.1, 4, 1, 1),
    ],
)
def test_rule_of_thumb(billions: float, ranks: int, per_host: int, degree: int) -> None:
    assert suggested_degree(int(billions * 1e9), ranks, per_host) == degree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_quantized_gradients", True),
        ("zero_hpz_partition_size", 8),
        ("zenflow", {"topk_ratio": 0.1}),
        ("offload_optimizer", {"device": "cpu", "super_offload": True}),
    ],
)
def test_features_with_groups_of_their_own_are_refused(path: str, value: object) -> None:
    check_config({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}})
    with pytest.raises(SmddpConfigError, match=path):
        check_config({"zero_optimization": {"stage": 3, path: value}})


def divide(ctx: Context) -> list[list[int]]:
    """Two data-parallel worlds of alternating ranks, as with tensor parallelism of two."""
    worlds = [list(range(first, ctx.size, 2)) for first in (0, 1)]
    mine, _ = dist.new_subgroups_by_enumeration(worlds)
    os.environ["SMDDP_SHARDED_DATA_PARALLEL_DEGREE"] = "2"
    try:
        sharding = Sharding.within(mine)
        assert sharding is not None
        assert Sharding.within(mine) is sharding
        assert Sharding.of(sharding.shard_group) is sharding
        assert sharding.replica == mine.rank() // 2
        return [
            dist.get_process_group_ranks(group)
            for group in (sharding.shard_group, sharding.replica_group)
        ]
    finally:
        del os.environ["SMDDP_SHARDED_DATA_PARALLEL_DEGREE"]


def test_groups_of_a_smaller_data_parallel_world(worlds: Pool) -> None:
    found = worlds("AAAAAAAA").run(divide, timeout=60)
    assert found[0] == [[0, 2], [0, 4]]
    assert found[3] == [[1, 3], [3, 7]]
    assert found[6] == [[4, 6], [2, 6]]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8))
def test_runs_and_their_complement_make_up_the_buffer(parts: list[tuple[int, int]]) -> None:
    runs = [(begin, begin + length) for begin, length in parts if length > 0]
    covered = {i for begin, end in runs for i in range(begin, end)}
    assert [i for begin, end in union(runs) for i in range(begin, end)] == sorted(covered)
    rest = [i for begin, end in without([(0, 70)], union(runs)) for i in range(begin, end)]
    assert rest == sorted(set(range(70)) - covered)


def average(ctx: Context) -> None:
    """Two replicas; every gradient is averaged once, whenever it was reduced, and however often."""
    world = dist.group.WORLD
    sharding = Sharding(1, world, world, world)
    buffer = torch.arange(10.0) + 10 * ctx.rank
    hop = ReplicaAllReduce(buffer, sharding)
    hop.start([1, 2], [buffer[2:4], buffer[4:5]])
    hop.start([3], [buffer[7:9]])
    assert hop.started == [(2, 5), (7, 9)]
    hop.forget([2])  # another gradient of it follows
    assert hop.started == [(7, 9)]
    assert buffer[2:5].tolist() == [7.0, 8.0, 9.0]
    buffer[4] += 2 * ctx.rank
    hop.start([2], [buffer[4:5]])
    hop.finish()
    assert buffer.tolist() == [5.0, 6.0, 7.0, 8.0, 10.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert hop.started == []
    hop.finish()
    assert buffer.tolist() == [5.0, 6.0, 7.0, 8.0, 10.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    # Each replica has reduced the gradients of two layers in another order.
    for layer in (0, 1) if ctx.rank == 0 else (1, 0):
        hop.start([layer], [buffer[3 * layer : 3 * layer + 3]])
    with pytest.raises(ReplicasDiffer, match="overlap_comm"):
        hop.finish()


def test_gradients_are_averaged_over_replicas(worlds: Pool) -> None:
    worlds("AA").run(average, timeout=60)
