"""The training with FSDP2, of torch alone, and whether reductions ran during the backward pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

WIDTH, BATCH = 24, 8


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)  # odd: padded for two ranks
        self.second = torch.nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def count_calls(calls: Counter[str]) -> None:
    """Counts the reductions that the backward pass does not wait for."""
    from deepspeed_smddp.fsdp.shared_collectives import Reductions

    original = Reductions.add

    def add(self: Any, *args: Any) -> None:
        calls["fsdp backward"] += 1
        original(self, *args)

    Reductions.add = add  # type: ignore[method-assign]


def features(calls: Counter[str]) -> dict[str, bool]:
    return {"fsdp backward": calls["fsdp backward"] > 0}


def train(job: dict[str, Any]) -> list[float]:
    dist.init_process_group(job["backend"])
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    if job["backend"] == "smddp":
        from deepspeed_smddp import fsdp

        fsdp.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(job["steps"]):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH, generator=random)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses
