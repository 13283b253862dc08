"""Trains tiny models with and without activation offloading, under ZeRO-3 and FSDP2."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from harness import model_jobs, training

HORIZON, LAYERS, BATCH, LENGTH, STEPS = 1, 5, 2, 33, 2
CHECKPOINTING: tuple[dict[str, Any] | None, ...] = (
    None,
    {"use_reentrant": False},
    {"use_reentrant": True},
)


def zero3(job: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    section: dict[str, Any] = {"enabled": True, "horizon": HORIZON}
    runs = [_zero3(CHECKPOINTING[1], {"enabled": False})]
    for kwargs in CHECKPOINTING:
        if kwargs is not None:
            section["directory"] = job["directory"]
        runs.append(_zero3(kwargs, section))
    dist.destroy_process_group()
    return {"runs": runs}


def fsdp2(job: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group(job["backend"])
    runs = [_fsdp2(CHECKPOINTING[1], False)]
    runs += [_fsdp2(kwargs, True) for kwargs in CHECKPOINTING]
    dist.destroy_process_group()
    return {"runs": runs}


def _model(kwargs: dict[str, Any] | None, llama: bool) -> Any:
    import torch

    torch.manual_seed(3)
    sizes = {"num_hidden_layers": LAYERS}
    model = model_jobs.llama(**sizes) if llama else model_jobs.gpt_neox(**sizes, hidden_dropout=0.1)
    if kwargs is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model.train()


def _batch(step: int) -> Any:
    import torch

    random = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
    return torch.randint(0, 64, (BATCH, LENGTH), generator=random)


def _zero3(kwargs: dict[str, Any] | None, section: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    model = _model(kwargs, llama=False)
    config = training.config("smddp", "fp32") | {
        "train_micro_batch_size_per_gpu": BATCH,
        "smddp": {"activation_offload": section},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses = []
    for step in range(STEPS):
        tokens = _batch(step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = training.state_of(engine)
    offload = getattr(engine.module, "_smddp_activation_offload", None)
    assert (offload is not None) == section["enabled"]
    engine.destroy()
    return _result(kwargs, losses, state, offload)


def _fsdp2(kwargs: dict[str, Any] | None, offloaded: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    from deepspeed_smddp import offload_activations

    model = _model(kwargs, llama=True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    offload = offload_activations(model, HORIZON) if offloaded else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, state = [], hashlib.sha256()
    for step in range(STEPS):
        tokens = _batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for parameter in model.parameters():
            state.update(parameter.grad.full_tensor().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _result(kwargs, losses, state.hexdigest(), offload)


def _result(
    kwargs: dict[str, Any] | None, losses: list[float], state: str, offload: Any
) -> dict[str, Any]:
    found = {"losses": losses, "state": state, "out": 0, "checkpointing": kwargs}
    if offload is not None:
        counts = offload.statistics
        assert counts.resident_bytes == 0
        found |= {"out": counts.bytes_out, "late": counts.late, "peak": counts.peak_resident_bytes}
        found["window"] = (HORIZON + 1) * BATCH * LENGTH * model_jobs.SIZES["hidden_size"] * 4
    return found
