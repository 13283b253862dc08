"""One rank of test_sharding_bytes. Each line of input builds an engine or trains some steps."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import deepspeed  # noqa: E402

WIDTH, LAYERS, MICRO_STEPS = 512, 6, 3
MODEL_BYTES = 4 * WIDTH * WIDTH * LAYERS


def answer_with(value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def build(degree: int) -> Any:
    """An engine that gathers each parameter once per forward and once per backward pass."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    zero = {
        "stage": 3,
        "reduce_bucket_size": WIDTH * WIDTH,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    config = {
        "comm_backend": "smddp",
        "smddp": {"sharded_data_parallel_degree": degree},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_STEPS,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-4}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def train(engine: Any, steps: int) -> None:
    for _ in range(steps * MICRO_STEPS):
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
    engine.optimizer.parameter_offload.partition_all_parameters()


def main() -> None:
    torch.set_num_threads(1)
    engine: Any = None
    answer_with("ready")
    for line in sys.stdin:
        command, argument = json.loads(line)
        if command == "build":
            engine = build(argument)
            train(engine, 3)  # DeepSpeed records the order of the parameters
        else:
            train(engine, argument)
        answer_with("done")
    dist.destroy_process_group()


main()
