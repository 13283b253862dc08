"""Trains a tiny GPT-NeoX with ZeRO-3 sharded by some degree: losses, norms and replicas.

The data of a step is one batch for all ranks, so that worlds of different sizes train on the same
data; ``BATCH`` sequences are divided over ranks and micro-steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import model_jobs, training

BATCH = 36
MODEL = {
    **model_jobs.SIZES,
    "vocab_size": 131,
    "hidden_size": 36,
    "num_hidden_layers": 1,
    "intermediate_size": 90,
}


def config(run: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The DeepSpeed config of a run; the run's ``zero`` and ``config`` overwrite its keys."""
    micro_steps = run.get("micro_steps", 3)
    made = training.config("smddp", "fp32")
    made |= {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // (ranks * micro_steps),
        "gradient_accumulation_steps": micro_steps,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 10},
        },
    }
    made["zero_optimization"] |= {"reduce_bucket_size": 8000, **run.get("zero", {})}
    if "degree" in run:
        made["smddp"] = {"sharded_data_parallel_degree": run["degree"]}
    return made | run.get("config", {})


def carry_out(job: dict[str, Any]) -> dict[str, Any]:
    """Executes the job's runs one after the other in one process group."""
    import torch.distributed as dist

    results = [train(run) for run in job["runs"]]
    dist.destroy_process_group()
    return {"runs": results}


def train(run: dict[str, Any]) -> dict[str, Any]:
    """Builds an engine, loads if asked to, trains, saves if asked to.

    Keys of a run: ``degree``, ``micro_steps``, ``zero``, ``config`` (see :func:`config`);
    ``zero_init``: with the config, or "bare"; ``seed_by_rank``: every rank makes other values;
    ``apply``: ``Module.apply`` sets the values; ``set_on``: a rank sets a parameter afterwards;
    ``checkpointing``: recompute activations; ``frozen``: freeze an embedding; ``poison``: at this
    step the last rank's loss is too large; ``steps`` from ``first`` on; ``save`` after the step
    ``save_after`` (DeepSpeed's tools then read it, unless ``convert`` is False); ``load`` before
    the first step; ``killed``: this rank ends in the middle of this step; ``log``: a file for each
    step's loss; ``unknown``: as if DeepSpeed's sources were others.
    """
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from deepspeed_smddp.upstream import source

    class Applied(GPTNeoXForCausalLM):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.apply(rise)

    def rise(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.05)

    ranks = int(os.environ["WORLD_SIZE"])
    ds_config = config(run, ranks)
    rank = int(os.environ["RANK"])
    if "fp16" in ds_config:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # slow on CPUs, but correct
    torch.manual_seed(rank if run.get("seed_by_rank") else 3)
    if "unknown" in run:
        feature = "sharded_data_parallel_degree"
        source.READ[feature] = {place: {} for place in source.READ[feature]}
    scope = contextlib.nullcontext()
    if run.get("zero_init") == "bare":
        scope = deepspeed.zero.Init(dtype=torch.float32)
    elif run.get("zero_init"):
        scope = deepspeed.zero.Init(config_dict_or_path=ds_config)
    with scope:
        kind = Applied if run.get("apply") else GPTNeoXForCausalLM
        model = kind(GPTNeoXConfig(**MODEL))
    if run.get("checkpointing"):
        model.gradient_checkpointing_enable()
    if run.get("frozen"):
        model.gpt_neox.embed_in.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=ds_config)
    except ValueError as error:
        return {"refused": str(error)}
    if "set_on" in run:
        weight = model.gpt_neox.layers[0].attention.dense.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=run["set_on"]):
            if rank == run["set_on"]:
                weight.data.fill_(0.01)
    if "load" in run:
        path, _ = engine.load_checkpoint(run["load"])
        assert path is not None
    losses, norms, rates, gradient, early = [], [], [], [], 0.0
    for step in range(run.get("first", 0), run["steps"]):
        total = torch.zeros((), dtype=torch.float64)
        for tokens in batches(step, engine.gradient_accumulation_steps()):
            loss = engine(input_ids=tokens, labels=tokens).loss
            if [rank, step] == run.get("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == run.get("poison") and rank == ranks - 1:
                loss = loss * 1e30
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary() and step == run["steps"] - 1:
                bias = engine.module.gpt_neox.final_layer_norm.bias
                gradient = safe_get_full_grad(bias).tolist()
                early = averaged_early(engine.optimizer)
            engine.step()
            total += loss.detach().double() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        norms.append(float(engine.get_global_grad_norm()))
        rates += engine.get_lr()
        if rank == 0 and "log" in run:
            with Path(run["log"]).open("a") as log:
                log.write(f"{step} {losses[-1]!r} {rates[-1]!r}\n")
        if step + 1 == run.get("save_after"):
            engine.save_checkpoint(run["save"])
            if run.get("convert", True):
                convert(engine, Path(run["save"]), bool(run.get("frozen")))
    held = sum(parameter.ds_tensor.numel() for parameter in engine.module.parameters())
    result = {
        "losses": losses,
        "norms": norms,
        "gradient": gradient,
        "rates": rates,
        "state": training.state_of(engine),
        "held": held,
        "early": early,
        "of": sum(parameter.ds_numel for parameter in engine.module.parameters()),
        "skipped": engine.skipped_steps,
        "loss_scale": float(engine.optimizer.loss_scale),
        "world": engine.dp_world_size,
    }
    engine.destroy()
    return result


def averaged_early(optimizer: Any) -> float:
    """The part of this rank's gradients whose replica all-reduce began in the backward pass."""
    hop = getattr(optimizer, "replica_all_reduce", None)  # DeepSpeed's own class without a degree
    started = 0 if hop is None else sum(end - begin for begin, end in hop.started)
    return round(started / optimizer.grad_partitions_flat_buffer.numel(), 1)


def convert(engine: Any, folder: Path, frozen: bool) -> None:
    """DeepSpeed's tools read the checkpoint: zero_to_fp32, and ds_to_universal beside it."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[name] = parameter.detach().clone()
    if dist.get_rank() == 0:
        read = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        for name, value in whole.items():
            assert torch.equal(read[name], value), name
        if not frozen:  # the tool leaves frozen parameters out
            ds_to_universal.main(
                SimpleNamespace(
                    input_folder=str(folder / f"global_step{engine.global_steps}"),
                    output_folder=f"{folder}-universal/universal",
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=False,
                )
            )
    dist.barrier()


def batches(step: int, micro_steps: int) -> Any:
    """This rank's micro-batches of the step."""
    import torch
    import torch.distributed as dist

    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (BATCH, 9), generator=random)
    tokens[:, 1::2] = tokens[:, :-1:2] + 1  # a pattern to learn
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].chunk(micro_steps)
