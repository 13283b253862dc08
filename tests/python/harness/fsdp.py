"""Trains a small transformer sharded by FSDP2, FSDP1 or not at all, inside a rank of a world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import deepspeed_smddp
from deepspeed_smddp import fsdp
from harness.worker import Context

WIDTH, WORDS, LENGTH, BATCH = 96, 256, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)  # a size that no number of ranks divides
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(self.norm(x)).cumsum(1) / LENGTH
        return x + self.down(torch.nn.functional.gelu(self.up(y)))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Run:
    """``sharding``: "fsdp2", "fsdp1" or "none". ``save`` after the last step, ``load`` before."""

    sharding: str = "fsdp2"
    enable: bool = True
    degree: int = 0
    prefetch: int = 1
    dtype: str | None = None  # the parameters' while they are gathered
    reduce_dtype: str | None = None
    micro_steps: int = 1
    divide: float | None = None
    force_sum: bool = False
    steps: int = 3
    first: int = 0
    save: str | None = None
    load: str | None = None


def train(ctx: Context, run: Run) -> dict[str, Any]:
    """Losses and gradient norms over all ranks, the last step's gradients, and the counters."""
    torch.manual_seed(5)
    model: Any = Model()
    if run.sharding == "fsdp2":
        _shard(model, run)
    elif run.sharding == "fsdp1":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if run.load:
        state = _state(model, optimizer)
        checkpoint.load(state, checkpoint_id=run.load)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    if ctx.backend == "smddp":
        deepspeed_smddp.reset_statistics()
    losses, norms = [], []
    for step in range(run.first, run.first + run.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(run.micro_steps):
            last = micro == run.micro_steps - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            tokens = batch(step)
            rows = tokens[micro :: run.micro_steps]
            if run.sharding != "none":
                rows = rows[ctx.rank :: ctx.size]
            logits = model(rows[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (loss / run.micro_steps).backward()
            total += loss.detach().double() / run.micro_steps
        if run.sharding != "none":
            dist.all_reduce(total)
            total /= ctx.size
        losses.append(total.item())
        if run.sharding == "fsdp1":
            norm = model.clip_grad_norm_(1e9)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
    rows_ = deepspeed_smddp.statistics() if ctx.backend == "smddp" else []
    gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in _gradients(model)]
    if run.save:
        checkpoint.save(_state(model, optimizer), checkpoint_id=run.save)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": [] if run.sharding == "fsdp1" else [g.float().numpy() for g in gradients],
        "statistics": [dict(row) for row in rows_],
    }


def batch(step: int) -> torch.Tensor:
    """The tokens of all ranks: something that can be learnt, int64 [BATCH, LENGTH + 1]."""
    random = torch.Generator().manual_seed(1000 + step)
    first = torch.randint(0, WORDS, (BATCH, 1), generator=random)
    return (first + 3 * torch.arange(LENGTH + 1)) % WORDS


def _shard(model: Model, run: Run) -> None:
    dtypes = [getattr(torch, name) if name else None for name in (run.dtype, run.reduce_dtype)]
    options: dict[str, Any] = {
        "mesh": fsdp.mesh(run.degree),
        "mp_policy": MixedPrecisionPolicy(*dtypes),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(run.force_sum)
            if run.divide is not None:
                module.set_gradient_divide_factor(run.divide)
    if run.enable:
        assert fsdp.enable(model, forward_prefetch=run.prefetch) is model


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
