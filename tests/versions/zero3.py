"""The training with ZeRO-3, and what of this package took part in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

WIDTH = 24
ACCUMULATION = 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.second = torch.nn.Linear(3 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def config(backend: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "eps": 1e-6}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 2_000,
            "stage3_param_persistence_threshold": 30,
        },
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
    }
    if backend == "smddp":
        chosen["comm_backend"] = "smddp"
    return chosen


def count_calls(calls: Counter[str]) -> None:
    """Counts what this package carries out in place of DeepSpeed's own paths."""
    from deepspeed_smddp.deepspeed import gather, overlap, reduce

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    gather.Piece.__init__ = counted("gather", gather.Piece.__init__)  # type: ignore[method-assign]
    reduce.start = counted("reduce", reduce.start)
    overlap.Overlap.start = counted("overlap", overlap.Overlap.start)  # type: ignore[method-assign]


def features(calls: Counter[str]) -> dict[str, bool]:
    """What took part in the training, or, where that leaves no trace, is installed."""
    from deepspeed_smddp.deepspeed import auto
    from deepspeed_smddp.upstream import source, wrapping

    filled_in = wrapping.is_wrapped(deepspeed.runtime.config.get_zero_config)
    return {
        **{name: calls[name] > 0 for name in ("gather", "reduce", "overlap")},
        "bucket sizes": filled_in and auto._choice is not None,
        "comms log": source.refusal("comms log") is None,
        "monitor": source.refusal("monitor") is None,
        "sharding": source.refusal("sharded_data_parallel_degree") is None,
    }


def train(job: dict[str, Any]) -> list[float]:
    # Else DeepSpeed compiles its shared memory for CPUs, which no collective here uses.
    operations = getattr(deepspeed.ops, "__compatible_ops__", {})
    operations["deepspeed_shm_comm"] = False
    if job["backend"] != "smddp":
        deepspeed.init_distributed(dist_backend=job["backend"], verbose=False)
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(job["backend"])
    )
    assert dist.get_backend() == job["backend"], dist.get_backend()
    if job["load"]:
        path, _ = engine.load_checkpoint(job["folder"])
        assert path is not None, "no checkpoint was loaded"
    losses = []
    for step in range(engine.global_steps, job["steps"]):
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(ACCUMULATION):
            seed = 1000 * step + 10 * micro_step + dist.get_rank()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
            loss = (engine(x) - x.roll(1, dims=1)).float().square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item())
        if job["save_at"] == step + 1:
            engine.save_checkpoint(job["folder"])
    return losses
