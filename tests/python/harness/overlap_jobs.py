"""Counts, inside a ZeRO-3 step, the operations in flight while the model computes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.variables import debug

STEPS = 3
Look = Callable[[str], None]


def computes_until(done: Callable[[], bool], limit: float = 30) -> bool:
    """Only multiplies matrices until ``done`` returns True; False if the limit passes first."""
    x = torch.eye(96)
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            return False
        for _ in range(20):
            x = x @ x
    return True


class Probe(torch.autograd.Function):
    """An identity that calls ``look`` in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Look) -> torch.Tensor:
        ctx.look = look
        look("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.look("backward")
        return gradients[0], None


class Model(torch.nn.Module):
    """Linear layers with a probe after each."""

    def __init__(self, width: int, look: Look) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self._look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Probe.apply(layer(x), self._look)
        return x


def run(job: dict[str, Any]) -> dict[str, Any]:
    """By direction: the operations in flight at each look of the last step, and whether they ended.

    ``layers``: the number of layers in a bucket of gradients. ``ours`` false: DeepSpeed's paths.
    """
    os.environ |= debug(zero_paths=int(job.get("ours", True)))
    import deepspeed

    from deepspeed_smddp.deepspeed import gather, overlap

    pieces: list[Any] = []
    reductions: list[Any] = []  # of this step
    seen: dict[str, list[tuple[int, bool]]] = {"forward": [], "backward": []}
    original = gather.Piece.__init__
    width = job.get("width", 64)
    layer = width * width + width

    def init(piece: Any, *args: Any) -> None:
        original(piece, *args)
        pieces.append(piece)

    start = overlap.Overlap.start

    def starts(ours: Any, *args: Any) -> None:
        start(ours, *args)
        reductions.append(ours._in_flight[-1].work)

    def look(direction: str) -> None:
        works: Sequence[Any]
        if direction == "forward":
            works = [piece._work for piece in pieces if piece._memory]
        else:
            works = reductions
        ended = computes_until(lambda: all(work.is_completed() for work in works))
        seen[direction].append((len(works), ended))

    overlap.Overlap.start = starts  # type: ignore[method-assign]
    gather.Piece.__init__ = init  # type: ignore[method-assign]
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(
        model=(model := Model(width, look)),
        model_parameters=model.parameters(),
        config={
            "comm_backend": job["backend"],
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": job["contiguous"],
                "reduce_bucket_size": job.get("layers", 1) * layer,
                "stage3_prefetch_bucket_size": layer,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 3 * layer,
                "stage3_max_reuse_distance": 0,
            },
            "steps_per_print": 1_000_000,
        },
    )
    for step in range(STEPS):
        for looks in seen.values():
            looks.clear()
        reductions.clear()
        random = torch.Generator().manual_seed(step + 10 * dist.get_rank())
        loss = engine(torch.randn(2, width, generator=random)).square().mean()
        engine.backward(loss)
        engine.step()
    shards = torch.cat([param.ds_tensor.flatten() for param in model.parameters()])
    digest = hashlib.sha256(shards.numpy().tobytes()).hexdigest()
    engine.destroy()
    overlap.Overlap.start = start  # type: ignore[method-assign]
    gather.Piece.__init__ = original  # type: ignore[method-assign]
    dist.destroy_process_group()
    return {"seen": seen, "shards": digest}
