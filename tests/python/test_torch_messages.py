"""torch's pipelines and torch's own tests of messages, on CPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as pp

import deepspeed_smddp
from harness.worker import Context
from harness.world import Pool, fresh
from test_point_to_point import paths

STAGES, MICRO, WIDTH = 4, 8, 12
SCHEDULES = {
    "GPipe": pp.ScheduleGPipe,
    "1F1B": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "zero bubble": pp.ScheduleInterleavedZeroBubble,
    "ZBV": pp.ScheduleZBVZeroBubble,
}


def pipeline(ctx: Context, name: str) -> tuple[list[float], list[str]]:
    """The losses of three steps, and the paths of messages."""
    deepspeed_smddp.reset_statistics()
    kind: Any = SCHEDULES[name]
    single = name in ("GPipe", "1F1B")
    per_rank = 1 if single else 2
    count = STAGES * per_rank
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    places = [ctx.rank + STAGES * i for i in range(per_rank)]
    if name == "ZBV":
        places = [ctx.rank, count - 1 - ctx.rank]
    device = torch.device("cpu")
    stages = [pp.PipelineStage(layers[p], p, count, device) for p in places]
    loss_of = nn.MSELoss()
    schedule = kind(stages[0] if single else stages, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for at in places for p in layers[at].parameters()], lr=0.1)
    last = any(p == count - 1 for p in places)
    losses: list[float] = []
    for step in range(3):
        torch.manual_seed(100 + step)
        x, target = torch.randn(MICRO * 2, WIDTH), torch.randn(MICRO * 2, WIDTH)
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        arguments = (x,) if 0 in places else ()
        if last:
            schedule.step(*arguments, target=target, losses=parts)
        else:
            schedule.step(*arguments)
        optimizer.step()
        losses += [part.item() for part in parts]
    return losses, sorted(path for name, path in paths() if name in ("send", "recv"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines_of_torch_have_the_losses_of_gloo(worlds: Pool, name: str) -> None:
    wanted = worlds("AAAA", backend="gloo").run(pipeline, name)
    for layout in ("AAAA", "AABB"):
        got = worlds(layout).run(pipeline, name)
        assert [losses for losses, _ in got] == [losses for losses, _ in wanted]
        assert any(losses for losses, _ in got)
        for _, taken in got:
            assert taken and not [path for path in taken if path.startswith("fallback")], taken


# ---- torch's own tests of messages

OF_TORCH = [
    f"test_{call}{profiler}"
    for call in ("send_recv", "send_recv_any_source", "send_recv_with_tag", "isend")
    for profiler in ("", "_autograd_profiler", "_torch_profiler")
]


def messages_of_torch(ctx: Context) -> None:
    os.environ["BACKEND"] = "smddp"
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    class Messages(TestCase, DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self) -> None:
            dist.barrier()

    for name in [*OF_TORCH, "test_irecv"]:
        Messages(name).debug()
    assert not [path for _, path in paths() if path.startswith("fallback")], paths()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["AAA", "AAB"])
def test_of_torch(layout: str) -> None:
    with fresh(layout) as world:
        world.run(messages_of_torch)
