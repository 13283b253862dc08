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
from deepspeed_smddp.distributed import memory
from harness.worker import Context

# A shard of bf16 on four ranks is larger than a slot.
WIDTH, WORDS, LENGTH, BATCH = 96, 512, 16, 8


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
    """``sharding``: "fsdp2", "fsdp1" or "none". ``save`` after the last step, ``load`` at first.

    ``memory``: that of FSDP2's buffers is "torch"'s, or by torch's switch "the group"'s; or
    "everything", or the "parameters", lie in memory that the host shares.
    """

    sharding: str = "fsdp2"
    enable: bool = True
    degree: int = 0
    prefetch: int = 1
    dtype: str | None = None  # of gathered parameters
    reduce_dtype: str | None = None
    micro_steps: int = 1
    divide: float | None = None
    force_sum: bool = False
    steps: int = 3
    first: int = 0
    save: str | None = None
    load: str | None = None
    memory: str = "torch"


def train(ctx: Context, run: Run) -> dict[str, Any]:
    """Losses and gradient norms over all ranks, the last step's gradients, and the counters."""
    if run.memory == "everything":
        memory.install()
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
    if run.memory == "parameters":
        assert not any(map(memory.is_shared, model.parameters()))
        assert memory.share_(model) is model
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
    if run.memory == "parameters":
        assert all(map(memory.is_shared, model.parameters()))
    if run.save:
        checkpoint.save(_state(model, optimizer), checkpoint_id=run.save)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": [] if run.sharding == "fsdp1" else [g.float().numpy() for g in gradients],
        "statistics": [dict(row) for row in rows_],
    }


def batch(step: int) -> torch.Tensor:
    """The tokens of all ranks, with a pattern to learn: int64 [BATCH, LENGTH + 1]."""
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
            if run.memory == "the group":
                module.set_allocate_memory_from_process_group_for_comm(True)
            if run.divide is not None:
                module.set_gradient_divide_factor(run.divide)
    if run.enable:
        assert fsdp.enable(model, forward_prefetch=run.prefetch) is model


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def uses_of_a_backward_pass(ctx: Context) -> dict[str, tuple[int, bool]]:
    """By use of FSDP2: the reductions that ran in the background of backward passes, and whether
    the parameters after a step equal those without ``enable``, to the bit."""

    def once(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    def twice(model: nn.Module, x: torch.Tensor) -> None:
        once(model, x)
        once(model, x)

    def shared(model: Any, x: torch.Tensor) -> None:
        model[0](model(x)).sum().backward()

    cast = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (once, {}),
        "existing gradients": (twice, {}),
        "a layer used twice": (shared, {}),
        "hooks of gradients": (_step_in_backward, {}),
        "after a failed pass": (_failed_before, {}),
        "sums in another type": (once, {"mp_policy": cast}),
        "copies": (once, {"mesh": fsdp.mesh(1)}),
    }
    return {name: _with_and_without(ctx, use, options) for name, (use, options) in cases.items()}


def _with_and_without(ctx: Context, use: Any, options: dict[str, Any]) -> tuple[int, bool]:
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if enabled:
            fsdp.enable(model)
        torch.manual_seed(ctx.rank)
        use(model, torch.randn(8, 64))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
        found.append([p.full_tensor() for p in model.parameters()])
    comm = model[0]._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return comm._reductions.started, same


def _step_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(x).sum().backward()


def _failed_before(model: nn.Module, x: torch.Tensor) -> None:
    handle = model[1].register_full_backward_hook(lambda *_: 1 / 0)
    try:
        model(x).sum().backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the backward pass did not fail")
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    model(x).sum().backward()
