"""A model wrapped by DDP or by FSDP2 trains as over Gloo, on one, two and three hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness.worker import Context
from harness.world import Pool


def perceptron() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
    )


def train(ctx: Context, model_: nn.Module, steps: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW(model_.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(1000 * step + ctx.rank)
        x = torch.randn(16, 20, generator=random)
        loss = ((model_(x) - x[:, :3].sin()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ctx.size)
    return losses


def ddp(ctx: Context, hook: bool) -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(
        perceptron(), bucket_cap_mb=0.005, broadcast_buffers=False
    )
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(ctx, wrapped)


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "fp16 hook"])
@pytest.mark.parametrize("layout", ["AA", "AB", "ABC"])
def test_ddp_equals_gloo(worlds: Pool, layout: str, hook: bool) -> None:
    got = worlds(layout).run(ddp, hook)
    wanted = worlds("A" * len(layout), "gloo").run(ddp, hook)
    assert got[0] == got[-1] and wanted[0][-1] < wanted[0][0]
    assert got[0] == pytest.approx(wanted[0], rel=1e-2 if hook else 1e-6)


def fsdp(ctx: Context) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    network = perceptron()
    grid = init_device_mesh("cpu", (ctx.size,))
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=grid)
    fully_shard(network, mesh=grid)
    return train(ctx, network)


@pytest.mark.parametrize("layout", ["AA", "AB", "ABC"])
def test_fsdp2_equals_gloo(worlds: Pool, layout: str) -> None:
    got = worlds(layout).run(fsdp)
    wanted = worlds("A" * len(layout), "gloo").run(fsdp)
    assert got[0] == got[-1] and wanted[0][-1] < wanted[0][0]
    assert got[0] == pytest.approx(wanted[0], rel=1e-6)
