"""Trains tiny models with ZeRO-3 in many configurations; returns each rank's bits and counters."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from harness import model_jobs, training

# The changes of each scenario: the section "zero_optimization", the rest of the config, and this
# module's "engines", "coalesced", "zero_init", "checkpointing" and "model".
SCENARIOS: dict[str, dict[str, Any]] = {
    "prefetch": {"zero": {"stage3_prefetch_bucket_size": 20_000}},
    "persistence": {"zero": {"stage3_param_persistence_threshold": 8000}},
    "all released": {
        "zero": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    },
    "odd sizes": {"model": {"hidden_size": 44, "intermediate_size": 131, "vocab_size": 251}},
    "accumulation": {"config": {"gradient_accumulation_steps": 3}},
    "coalesced accumulation": {"config": {"gradient_accumulation_steps": 3}, "coalesced": True},
    "checkpointing": {
        "checkpointing": {"use_reentrant": False},
        "zero": {"contiguous_gradients": False},
    },
    "reentrant checkpointing": {
        "checkpointing": {"use_reentrant": True},
        "config": {"gradient_accumulation_steps": 2},
    },
    "zero.Init": {"zero_init": True},
    "two engines": {"engines": 2},
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "fp32 on the wire": {
        "config": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    },
    "optimizer offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "sequential": {"zero": {"stage3_allgather_sequential": True}},
    "hpZ": {"zero": {"zero_hpz_partition_size": 2}},
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the job's scenarios one after the other in one process group."""
    results = {
        name: train({**SCENARIOS.get(name, {}), **job.get("changes", {})})
        for name in job["scenarios"]
    }
    dist.destroy_process_group()
    return results


class Towers(torch.nn.Module):
    """Two layers of equal sizes, of which each rank runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.towers[dist.get_rank() % 2](x)


def unlike(job: dict[str, Any]) -> dict[str, Any]:
    """The error of ranks that gather, or that reduce the gradients of, different parameters."""
    import deepspeed

    config = training.config("smddp", "fp32")
    config["zero_optimization"] |= job["zero"]
    deepspeed.init_distributed("smddp", verbose=False)
    model = Towers()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    try:
        loss = engine(torch.ones(2, 16)).square().mean()
        engine.backward(loss)
    except RuntimeError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def half_full(job: dict[str, Any]) -> dict[str, Any]:
    """What a bucket does whose gradients are dropped, and one whose buffer is offloaded."""
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    from deepspeed_smddp.deepspeed import overlap

    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    engine = deepspeed.initialize(
        model=layers,
        model_parameters=layers.parameters(),
        config=training.config("smddp", "fp32"),
    )[0]
    engine.backward(engine(torch.ones(2, 16)).sum())
    spare = overlap._overlaps[engine.optimizer]._spare
    before = len(spare)

    def drop_meanwhile(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: layers.zero_grad())

    layers[0].register_forward_hook(drop_meanwhile)  # the second layer's gradients are there
    said = "nothing"
    try:
        engine.backward(engine(torch.ones(2, 16)).sum())
    except RuntimeError as error:
        said = str(error)
    engine.optimizer.offload_states(include=[OffloadStateTypeEnum.contiguous_grad_buffer])
    return {"said": said, "spare": (before, len(spare))}


def train(scenario: dict[str, Any]) -> dict[str, Any]:
    """Losses, a digest of the trained parameters and the counters of this rank."""
    import deepspeed
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    import deepspeed_smddp
    from deepspeed_smddp.deepspeed import auto

    config = training.config("smddp", "fp32")
    config["zero_optimization"] |= scenario.get("zero", {})
    config |= scenario.get("config", {})
    config["smddp"] = scenario.get("smddp", {})
    model_config = GPTNeoXConfig(**model_jobs.SIZES | scenario.get("model", {}))
    engines = []
    for seed in range(scenario.get("engines", 1)):
        torch.manual_seed(seed)
        scope = (
            deepspeed.zero.Init(config_dict_or_path=config)
            if scenario.get("zero_init")
            else contextlib.nullcontext()
        )
        with scope:
            model = GPTNeoXForCausalLM(model_config)
        if scenario.get("checkpointing"):
            model.gradient_checkpointing_enable(scenario["checkpointing"])
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        engines.append(engine)
    deepspeed_smddp.reset_statistics()
    losses = []
    micro_steps = config["gradient_accumulation_steps"]
    # If coalesced, DeepSpeed reduces once per step, and engine.step() comes after the context.
    coalesced = scenario.get("coalesced", False)
    coalescing = contextlib.ExitStack()
    for micro_step in range(training.STEPS * micro_steps):
        random = torch.Generator().manual_seed(100 * micro_step + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 33), generator=random)
        last = (micro_step + 1) % micro_steps == 0
        for engine in engines:
            if coalesced and micro_step % micro_steps == 0:
                coalescing.enter_context(engine.coalesce_grad_reduction())
            loss = engine(input_ids=tokens, labels=tokens).loss
            if coalesced:
                engine.set_gradient_accumulation_boundary(last)
            engine.backward(loss)
            if not coalesced:
                engine.step()
            losses.append(loss.item())
        if coalesced and last:
            coalescing.close()
            for engine in engines:
                engine.set_gradient_accumulation_boundary(True)
                engine.step()
    rows = [dict(row) for row in deepspeed_smddp.statistics()]
    state = [training.state_of(engine) for engine in engines]
    for engine in engines:
        engine.destroy()
    choice = auto._choice
    return {
        "losses": losses,
        "state": state,
        "statistics": rows,
        "choice": None if choice is None else dict(vars(choice)),
        "zero": {
            key: getattr(engines[0]._config.zero_config, key)
            for key in ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
        },
    }
