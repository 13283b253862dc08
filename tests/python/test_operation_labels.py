"""The flight recorder names what of a model calls an operation."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepspeed_smddp
from deepspeed_smddp.distributed import labels
from deepspeed_smddp.distributed.labels import labelled
from harness.worker import Context
from harness.world import Pool, World

WIDTH = 64


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def records_since(before: int) -> list[dict[str, Any]]:
    from deepspeed_smddp import _C

    return [dict(row) for row in _C.flight_record() if row["id"] > before]


def latest() -> int:
    from deepspeed_smddp import _C

    return max((row["id"] for row in _C.flight_record()), default=0)


def data_parallel(ctx: Context) -> list[str]:
    layer_mib = WIDTH * WIDTH * 4 / (1 << 20)
    parallel = DistributedDataParallel(model(), bucket_cap_mb=layer_mib)
    labels = []
    for _ in range(3):  # after the first backward pass DDP cuts its buckets anew
        before = latest()
        parallel(torch.ones(2, WIDTH)).sum().backward()
        dist.all_reduce(torch.ones(1))
        labels = [r["label"] for r in records_since(before) if r["operation"] == "all_reduce"]
    return labels


def fully_sharded(ctx: Context) -> list[tuple[str, str]]:
    layers = model()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    deepspeed_smddp.fsdp.enable(layers)
    before = latest()
    layers(torch.ones(2, WIDTH)).sum().backward()
    return [(r["operation"], r["label"]) for r in records_since(before)]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.towers[dist.get_rank()](x)


def other_modules(ctx: Context) -> str:
    model = Towers()
    for layer in (*model.towers, model):
        fully_shard(layer)
    deepspeed_smddp.fsdp.enable(model, forward_prefetch=0)
    try:
        model(torch.ones(2, WIDTH))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def own_label(ctx: Context) -> list[str]:
    before = latest()
    with labelled("my label"):
        dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))
    return [row["label"] for row in records_since(before)]


def test_gradient_buckets_are_numbered_in_each_backward_pass(worlds: Pool) -> None:
    for found in worlds("AA").run(data_parallel):
        assert len(found) >= 3
        numbered = [f"gradient bucket {i} of the backward pass" for i in range(1, len(found))]
        assert found == [*numbered, ""], "the last one is the user's own"


def test_operations_of_fsdp2_have_the_name_of_the_module(worlds: Pool) -> None:
    for calls in worlds("AA").run(fully_sharded):
        for operation in ("all_gather", "reduce_scatter"):
            named = {label for name, label in calls if name == operation}
            assert {"FSDP2 module 0", "FSDP2 module 1", "FSDP2 module 2"} <= named


def test_ranks_that_run_different_modules_are_told_so() -> None:
    with closing(World("AA")) as world:
        for said in world.run(other_modules):
            assert "called it for other parameters of the same sizes" in said


def test_a_label_ends_with_its_context(worlds: Pool) -> None:
    assert worlds("AA").run(own_label) == [["my label", ""]] * 2


@pytest.mark.quick
def test_ever_other_parameters_do_not_grow_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    core = SimpleNamespace(label_number=lambda text: asked.append(text) or len(asked))
    monkeypatch.setattr(labels.extension, "core", core)
    monkeypatch.setattr(labels, "_texts", 0)
    monkeypatch.setattr(labels, "_MOST_TEXTS", 3)
    labels._number.cache_clear()
    numbers = [labels._number(*one) for one in [("a", ()), *(("a", (str(i),)) for i in range(9))]]
    assert numbers == [1, 2, 3, *[1] * 7]
    assert labels._number("b", ("1",)) == 0
    assert asked == ["a", "a\n0", "a\n1"]
    labels._number.cache_clear()
