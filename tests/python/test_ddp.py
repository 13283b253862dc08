"""DistributedDataParallel over smddp, with all its options, gives Gloo's results to the bit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import deepspeed_smddp
from harness.worker import Context
from harness.world import Pool

WIDTH, STEPS = 100, 4


@dataclass
class Run:
    """``options`` of DDP; ``hook``: of HOOKS; ``join``: rank r has r batches more than rank 0."""

    options: tuple[str, ...] = ()
    hook: str | None = None
    accumulate: int = 1
    unused: bool = False
    join: bool = False
    one_bucket: bool = False
    batch_norm: bool = False


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if run.batch_norm else nn.Identity()
        self.either = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor, which: int | None) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        for i, layer in enumerate(self.either):
            if which in (i, None):
                x = x + layer(x)
        return self.last(x)


def bf16_hook(group, bucket):  # without annotations: torch checks them if a hook has any
    # Without a GPU, torch refuses its own bf16_compress_hook by its name.
    return default_hooks.bf16_compress_hook(group, bucket)


def powersgd_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)


def local_sgd_state() -> post_localSGD_hook.PostLocalSGDState:
    alone, _ = dist.new_subgroups(group_size=1)
    return post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)


def no_state() -> None:
    return None


# What makes a hook's state, and the hook.
HOOKS = {
    "allreduce": (no_state, default_hooks.allreduce_hook),
    "fp16": (no_state, default_hooks.fp16_compress_hook),
    "bf16": (no_state, bf16_hook),
    "powersgd": (powersgd_state, powerSGD_hook.powerSGD_hook),
    "local_sgd": (local_sgd_state, post_localSGD_hook.post_localSGD_hook),
}


def train(ctx: Context, run: Run) -> dict[str, Any]:
    """Each rank's losses, its parameters at the end, and the counters."""
    torch.manual_seed(3)
    options = dict.fromkeys(run.options, True)
    # Buckets of about one layer, so that several are in flight at once.
    # Hooks whose callbacks start operations need one: only so all ranks start them in one order.
    model = DistributedDataParallel(
        Model(run), bucket_cap_mb=25 if run.one_bucket else 0.05, **options
    )
    if run.hook is not None:
        make_state, hook = HOOKS[run.hook]
        model.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ctx.backend == "smddp":
        deepspeed_smddp.reset_statistics()
    losses = []
    with Join([model]) if run.join else contextlib.nullcontext():
        for step in range(STEPS + (ctx.rank if run.join else 0)):
            optimizer.zero_grad()
            for micro in range(run.accumulate):
                random = torch.Generator().manual_seed(100 * step + 10 * micro + ctx.rank)
                x = torch.randn(8, WIDTH, generator=random)
                # Each rank leaves out another layer.
                which = (step + ctx.rank) % 2 if run.unused else None
                last = micro == run.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = (model(x, which) - x[:, :7]).square().mean()
                    loss.backward()
            losses.append(loss.item())
            optimizer.step()
    rows = deepspeed_smddp.statistics() if ctx.backend == "smddp" else []
    return {
        "losses": losses,
        "parameters": [p.detach().numpy().copy() for p in model.parameters()],
        "buffers": [b.detach().numpy().copy() for b in model.buffers()],
        "statistics": [dict(row) for row in rows],
    }


RUNS = {
    "plain": Run(),
    "bucket_views": Run(options=("gradient_as_bucket_view",)),
    "static_graph": Run(options=("static_graph", "gradient_as_bucket_view")),
    "unused": Run(options=("find_unused_parameters",), unused=True),
    "no_sync": Run(accumulate=3),
    "no_sync_bucket_views": Run(options=("gradient_as_bucket_view",), accumulate=2),
    "allreduce_hook": Run(hook="allreduce"),
    "fp16_hook": Run(hook="fp16"),
    "bf16_hook": Run(hook="bf16"),
    **{f"{name}_hook": Run(hook=name, one_bucket=True) for name in list(HOOKS)[3:]},
    "join": Run(join=True),
    "buffers": Run(batch_norm=True),
}


@pytest.mark.parametrize("layout", ["AA", "AB"])
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_give_the_bits_of_gloo(worlds: Pool, name: str, layout: str) -> None:
    ours = worlds(layout).run(train, RUNS[name])
    theirs = worlds("AA", "gloo").run(train, RUNS[name])
    for got, wanted in zip(ours, theirs, strict=True):
        assert got["losses"] == wanted["losses"]
        for kind in ("parameters", "buffers"):
            for g, w in zip(got[kind], wanted[kind], strict=True):
                assert np.array_equal(g, w)
    for got in ours:
        if RUNS[name].one_bucket:  # these hooks send less than the gradients
            continue
        sums = [row for row in got["statistics"] if row["collective"] == "all_reduce"]
        moved = sum(row["bytes"] for row in sums if not row["path"].startswith("fallback"))
        assert moved >= STEPS * sum(p.nbytes for p in got["parameters"]) // 2


@pytest.mark.parametrize("layout", ["AABB", "ABC"])
@pytest.mark.parametrize("name", ["bucket_views", "unused", "join"])
def test_more_ranks_and_hosts(worlds: Pool, name: str, layout: str) -> None:
    """Sums run in another order than Gloo's."""
    ours = worlds(layout).run(train, RUNS[name])
    theirs = worlds("A" * len(layout), "gloo").run(train, RUNS[name])
    for got, wanted in zip(ours, theirs, strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for ours_, others in zip(got["parameters"], ours[0]["parameters"], strict=True):
            assert np.array_equal(ours_, others)  # all ranks end with the same bits


def several_in_flight(ctx: Context) -> bool:
    """DDP on all ranks while each half of them gathers in a group of its own."""
    half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][ctx.rank // 2]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(300, 300), gradient_as_bucket_view=True)
    for step in range(5):
        mine = torch.full((5000,), float(10 * step + ctx.rank))
        out = torch.empty(10_000)
        work = dist.all_gather_into_tensor(out, mine, group=half, async_op=True)
        model.zero_grad()
        model(torch.full((2, 300), float(ctx.rank))).sum().backward()
        work.wait()
        first = 2 * (ctx.rank // 2)
        assert out[0] == 10 * step + first and out[-1] == 10 * step + first + 1
        assert (model.module.weight.grad == 2 * 1.5).all()
    dist.destroy_process_group(half)
    return True


def test_ddp_and_all_gathers_in_overlapping_groups_at_once(worlds: Pool) -> None:
    assert all(worlds("AABB").run(several_in_flight))
