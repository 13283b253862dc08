"""Trains tiny models with tensor parallelism and ZeRO-3 or FSDP2, and in one process."""

from __future__ import annotations

import hashlib
import os
from types import SimpleNamespace
from typing import Any

from harness import model_jobs, training

BATCH = 8
MODELS: dict[str, Any] = {
    "llama": lambda: model_jobs.llama(num_key_value_heads=2, num_hidden_layers=3),
    "gpt_neox": lambda: model_jobs.gpt_neox(num_hidden_layers=1),
}
STEPS = {"llama": 20, "gpt_neox": 5}


def batch(step: int, ranks: int = 1, rank: int = 0) -> Any:
    """This rank's part of a step's batch, which is the same at any number of ranks."""
    import torch

    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (BATCH, 17), generator=random)
    tokens[:, 1::2] = tokens[:, :-1:2] + 1  # a pattern to learn
    return tokens.chunk(ranks)[rank]


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)


def one_process(name: str) -> list[list[float]]:
    """Losses and gradient norms of the whole batch."""
    import torch

    torch.manual_seed(3)
    model = MODELS[name]()
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS[name]):
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, norms]


def fsdp2(job: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group(job["backend"])
    found: dict[str, Any] = {name: _fsdp2(name) for name in MODELS}
    found["dropout"] = _dropout()
    dist.destroy_process_group()
    return found


def _fsdp2(name: str) -> list[list[float]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from deepspeed_smddp import delayed_init, materialize, offload_activations
    from deepspeed_smddp.tensor_parallel import clip_grad_norm_, tensor_parallel

    if name == "llama":  # with every feature together
        model = delayed_init(MODELS[name], seed=3)
        model.gradient_checkpointing_enable()
    else:
        torch.manual_seed(3)
        model = MODELS[name]()
    mesh = tensor_parallel(model, 2)
    data = mesh["data"]
    base = getattr(model, model.base_model_prefix)
    for layer in base.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    if name == "llama":
        materialize(model)
        offload = offload_activations(model, 1, min_bytes=1)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS[name]):
        tokens = batch(step, data.size(), data.get_local_rank())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=data.get_group())
        losses.append(mean.item() / data.size())
    if name == "llama":
        assert offload.statistics.bytes_out > 0
    return [losses, norms]


def _dropout() -> dict[str, Any]:
    """With dropout: values that are equal in a group, values that differ, and recomputed ones."""
    import torch

    from deepspeed_smddp.tensor_parallel import tensor_parallel

    found = {}
    for recomputed in (False, True):
        torch.manual_seed(3)
        model = model_jobs.gpt_neox(attention_dropout=0.3, hidden_dropout=0.2)
        torch.manual_seed(int(os.environ["RANK"]))
        mesh = tensor_parallel(model, 2, seed=5)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        alike = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        torch.manual_seed(9 + mesh["data"].get_local_rank())
        attention = model.gpt_neox.layers[0].attention
        masks: list[Any] = []
        attention.query_key_value.register_forward_hook(
            lambda *_, to=masks: to.append(torch.rand(3))
        )
        model.train()
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        after = torch.get_rng_state()
        loss.backward()
        gradient = model.gpt_neox.layers[0].input_layernorm.weight.grad
        found["recomputed" if recomputed else "kept"] = {
            "alike": alike,
            "loss": loss.item(),
            "gradient": gradient.tolist(),
            "after": hashlib.sha256(after.numpy().tobytes()).hexdigest(),
            "drawn inside": masks[0].tolist(),
            "drawn again": masks[-1].tolist(),
        }
    return found


def zero3(job: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    found = {name: _zero3(name) for name in MODELS}
    dist.destroy_process_group()
    return found


def _zero3(name: str) -> list[list[float]]:
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    torch.manual_seed(3)
    model = MODELS[name]()
    config = training.config("smddp", "fp32")
    config |= {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "smddp": {"tensor_parallel_degree": 2},
    }
    args = SimpleNamespace(deepspeed_config=config)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    assert args.deepspeed_config is config, "the caller's own"
    data = groups._get_data_parallel_group()
    ranks, rank = dist.get_world_size(data), dist.get_rank(data)
    assert engine.train_batch_size() == BATCH
    assert engine.dp_world_size == ranks == 2
    losses, norms = [], []
    for step in range(STEPS[name]):
        tokens = batch(step, ranks, rank)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=data)
        losses.append(mean.item() / ranks)
    engine.destroy()
    return [losses, norms]
