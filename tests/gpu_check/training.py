"""The losses of DDP, FSDP2 and ZeRO-3 over smddp, beside those over NCCL."""

from __future__ import annotations

import csv
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpu_check import place
from gpu_check.machine import ROOT
from gpu_check.ranks import beside_nccl, world
from gpu_check.step import NotHereError, Run
from harness.worker import Context

STEPS = 24
# Of a loss, relative: sums in another order, in fp32.
TOLERANCE = 1e-4


def compare(run: Run, scheme: str) -> None:
    """DDP or fully_shard: losses with the group over smddp and over NCCL (on CPUs, Gloo).

    The model, the data and the seed are the same.
    """
    for layout in ("AA", "AAAA"):
        with world(run, layout, SMDDP_FALLBACK="warn") as ranks:
            found = ranks.run(both, scheme)[0]
        if isinstance(found["theirs"], str):
            raise NotHereError(
                f"NCCL does not run here, so nothing to compare with: {found['theirs']}"
            )
        pairs = list(zip(found["ours"], found["theirs"], strict=True))
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        run.note(f"{layout}: losses over smddp", [round(a, 6) for a, _ in pairs[:: STEPS // 8]])
        run.note(f"{layout}: losses over the other", [round(b, 6) for _, b in pairs[:: STEPS // 8]])
        run.note(f"{layout}: paths", found["paths"])
        assert pairs[-1][0] < pairs[0][0], "the model does not learn"
        run.goal(f"{layout}: losses equal within {TOLERANCE}", worst <= TOLERANCE, f"{worst:.2e}")


def both(ctx: Context, scheme: str) -> dict[str, Any]:
    """Losses over the default group, then over NCCL's."""
    from deepspeed_smddp.distributed import backend

    other, why = other_group(ctx)
    backend.reset_statistics()
    ours = losses(ctx, scheme, None)
    paths = {f"{r['collective']} {r['path']}": r["calls"] for r in backend.statistics()}
    theirs = why if other is None else losses(ctx, scheme, other)
    return {"ours": ours, "theirs": theirs, "paths": paths}


def other_group(ctx: Context) -> tuple[Any, str]:
    """The group to compare with; a simulated device's tensors are the CPU's, for torch."""
    if place.here().name == "host":
        return dist.new_group(backend="gloo"), ""
    return beside_nccl(ctx)


def losses(ctx: Context, scheme: str, group: Any) -> list[float]:
    """The mean losses over all ranks, step by step."""
    device = "cuda" if place.here().name == "cuda" else "cpu"
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(129, 257), nn.GELU(), nn.Linear(257, 129)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(129, 1)).to(device)
    model = sharded(model, scheme, group, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        batch = torch.randn(8 * ctx.size, 129, generator=generator)
        mine = batch.view(ctx.size, -1, 129)[ctx.rank].to(device)
        loss = (model(mine) - mine.sum(1, keepdim=True).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().double().cpu() / ctx.size
        dist.all_reduce(mean)
        found.append(float(mean))
    return found


def sharded(model: nn.Module, scheme: str, group: Any, device: str) -> nn.Module:
    """The model over ``group``; None: the default one."""
    if scheme == "ddp":
        ids = [torch.cuda.current_device()] if device == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group if group is not None else dist.group.WORLD, device)
    for block in list(model.children()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def zero3(run: Run) -> None:
    """The demo, by ``benchmarks/gpu_zero3.py``; both runs round to bf16 in each step."""
    folder = run.folder / run.step.name
    ranks = max(2, run.gpus)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_zero3.py"), "--ranks", str(ranks)]
    done = subprocess.run([*command, "--steps", "40", "--out", str(folder)], cwd=ROOT, check=False)
    with (folder / f"zero3-{ranks}-ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    run.note("losses over smddp", [float(row["smddp"]) for row in rows[::5]])
    run.note("losses over NCCL", [float(row["nccl"]) for row in rows[::5]])
    worst = max(abs(float(r["smddp"]) / float(r["nccl"]) - 1) for r in rows)
    run.goal("losses equal within 2%, as bf16 rounds", done.returncode == 0, f"{worst:.2%}")
