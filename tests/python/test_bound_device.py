"""Device meshes and split_group on a default group that is bound to a GPU, as DeepSpeed's is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_smddp.fsdp
from deepspeed_smddp.distributed import split_group as subgroups
from harness import cases, fsdp
from harness.bound_device import bound
from harness.cases import Case
from harness.training import Trainer
from harness.worker import Context
from harness.world import Pool

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def check_mesh(ctx: Context, shape: tuple[int, ...]) -> None:
    names = ("first", "second", "third")[: len(shape)]
    with bound(ctx.rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        flat = mesh[names[:2]]._flatten("flat") if len(shape) > 2 else None
    ranks_of = torch.arange(ctx.size).view(shape)
    mine = (ranks_of == ctx.rank).nonzero()[0].tolist()
    for dimension, name in enumerate(names):
        index: list[Any] = list(mine)
        index[dimension] = slice(None)
        check_group(ctx, mesh.get_group(name), ranks_of[tuple(index)].tolist())
    if flat is not None:
        check_group(ctx, flat.get_group(), ranks_of[:, :, mine[2]].flatten().tolist())
    for name in names if len(shape) > 1 else ():
        dist.destroy_process_group(mesh.get_group(name))


def check_group(ctx: Context, group: dist.ProcessGroup, ranks: list[int]) -> None:
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_backend(group) == ctx.backend
    for collective in COLLECTIVES:
        cases.check(ctx, Case(collective, "base", torch.float32, (640,)), group, ranks)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("AAB", (3,)), ("AABB", (2, 2)), ("AABBCC", (3, 2)), ("AAAABBBB", (2, 2, 2))],
)
def test_device_mesh(worlds: Pool, layout: str, shape: tuple[int, ...]) -> None:
    worlds(layout).run(check_mesh, shape)


def split(ctx: Context, parts: list[list[int]]) -> None:
    with bound(ctx.rank):
        group = dist.split_group(
            split_ranks=parts, timeout=timedelta(seconds=17), group_desc="a part of all"
        )
    mine = [part for part in parts if ctx.rank in part]
    if not mine:
        assert group is None
        return
    assert group is not None
    assert group.group_desc == "a part of all"
    check_group(ctx, group, sorted(mine[0]))
    with bound(ctx.rank):  # of a group that is not the default one
        halves = [[place] for place in range(len(mine[0]))]
        alone = dist.split_group(group, split_ranks=halves)
    assert alone is not None
    check_group(ctx, alone, [ctx.rank])
    for made in (alone, group):
        dist.destroy_process_group(made)


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3, 1]], [[0], [1, 2, 3]]])
def test_split_group_leaves_the_other_ranks_without_one(
    worlds: Pool, parts: list[list[int]]
) -> None:
    worlds("AABB").run(split, parts)


def torchs_own(parent_pg: Any = None, split_ranks: Any = None) -> str:
    return "torch's own"


def refused(ctx: Context) -> list[str]:
    def message(make: Callable[[], Any]) -> str:
        try:
            make()
        except (ValueError, RuntimeError) as error:
            return str(error)
        raise AssertionError("not refused")

    with bound(ctx.rank):
        found = [
            message(lambda: dist.split_group(split_ranks=[])),
            message(lambda: dist.split_group(split_ranks=[[0], []])),
            message(lambda: dist.split_group(split_ranks=[[0, 0]])),
            message(lambda: dist.split_group(split_ranks=[[0, 9]])),
        ]
        gloo = dist.new_group(backend="gloo")
        found.append(subgroups.split(torchs_own, gloo, split_ranks=[[0], [1]]))
    return found


def test_what_split_group_refuses(worlds: Pool) -> None:
    for answer in worlds("AB").run(refused):
        assert "cannot be None or empty" in answer[0]
        assert "cannot be None or empty" in answer[1]
        assert "duplicate" in answer[2]
        assert "Rank 9 is out of range" in answer[3]
        assert answer[4:] == ["torch's own"]


def hybrid_sharded(ctx: Context) -> list[float]:
    with bound(ctx.rank):
        mesh = deepspeed_smddp.fsdp.mesh(2)
    with mock.patch.object(deepspeed_smddp.fsdp, "mesh", lambda _: mesh):
        return fsdp.train(ctx, fsdp.Run())["losses"]


def test_fsdp2_hybrid_sharding(worlds: Pool) -> None:
    wanted = worlds("A").run(fsdp.train, fsdp.Run(sharding="none"))[0]["losses"]
    for losses in worlds("AABB").run(hybrid_sharded):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("case", ["degree", "autotp", "ulysses"])
def test_deepspeeds_meshes(trainer: Trainer, case: str) -> None:
    pytest.importorskip("deepspeed")
    answers = trainer.call("harness.bound_jobs:train", "AABB", "smddp", case=case)
    for answer in answers:
        assert answer["losses"] == pytest.approx(answer["unbound"], rel=1e-6)
        assert answer["splits"] == 2
        assert len(answer["losses"]) == 3


def test_an_unknown_split_group_stays_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(parent: Any, parts: Any) -> None:
        """A split_group with other arguments."""

    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        monkeypatch.setattr(module, "split_group", other)
    subgroups.install()
    assert dist.split_group is dist.device_mesh.split_group is other
    assert "which refuses groups of smddp: it has no argument parent_pg" in caplog.text
