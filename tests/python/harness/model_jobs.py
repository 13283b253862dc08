"""Tiny models of transformers, and jobs that shard them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def gpt_neox(**changes: Any) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | changes))


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | {"pad_token_id": 3} | changes))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_embd=48, n_layer=2, n_head=4, n_positions=64, **ids)
    )


def vit() -> Any:
    from transformers import ViTConfig, ViTModel

    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "use_cache")}
    del sizes["max_position_embeddings"]
    return ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 256, "d_model": 48, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, d_kv=12))


BUILDS: dict[str, Callable[[], Any]] = {
    "gpt_neox": gpt_neox,
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "vit": vit,
    "t5": t5,
}
SHARDED = ("gpt_neox", "llama_tied")


def delayed(job: dict[str, Any]) -> dict[str, Any]:
    """Digests of each model's values: built directly, and delayed under FSDP2 and ZeRO-3."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(job["backend"])
    found = {}
    for name in SHARDED:
        torch.manual_seed(7)
        eager = BUILDS[name]()
        found[name] = {"eager": _digest(eager)}
        found[name]["fsdp2"] = _delayed_fsdp2(BUILDS[name])
        if job["backend"] == "smddp":
            found[name]["zero3"] = _delayed_zero3(BUILDS[name], False)
    if job["backend"] == "smddp":
        torch.manual_seed(7)
        eager = BUILDS["gpt_neox"]()
        original = {buffer.shape: buffer.clone() for buffer in eager.buffers()}
        eager = eager.bfloat16()
        for module in eager.modules():  # DeepSpeed does not cast buffers of such a model
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = original[buffer.shape].clone()
        found["gpt_neox, bf16"] = {
            "eager": _digest(eager),
            "zero3": _delayed_zero3(BUILDS["gpt_neox"], True),
        }
    dist.destroy_process_group()
    return found


def _digest(model: Any, whole: Callable[[Any], Any] = lambda parameter: parameter) -> str:
    import torch

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = whole(parameter).detach()
        digest.update(name.encode() + str(value.dtype).encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for name, buffer in model.named_buffers():
        digest.update(name.encode() + buffer.float().numpy().tobytes())
    return digest.hexdigest()


def _delayed_fsdp2(build: Callable[[], Any]) -> str:
    import torch
    from torch.distributed.fsdp import fully_shard

    from deepspeed_smddp import delayed_init, materialize

    # Seeds differ; the generator of rank 0, with seed 7, holds for all ranks.
    torch.manual_seed(int(os.environ["RANK"]))
    if os.environ["RANK"] == "0":
        torch.manual_seed(7)
    model = delayed_init(build)
    base = getattr(model, model.base_model_prefix)
    for layer in base.layers:
        fully_shard(layer)
    fully_shard(model)
    materialize(model)
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.zero_grad()
    for module in reversed(list(model.modules())):
        if hasattr(module, "reshard"):
            module.reshard()
    return _digest(model, lambda p: p.full_tensor())


def _delayed_zero3(build: Callable[[], Any], bf16: bool) -> str:
    import deepspeed
    import torch

    from deepspeed_smddp import delayed_init, materialize
    from harness import training

    config = training.config("smddp", "bf16" if bf16 else "fp32")
    model = materialize(delayed_init(build, seed=7), ds_config=config)
    held = sum(p.ds_tensor.numel() for p in model.parameters())
    every = sum(p.ds_numel for p in model.parameters())
    assert held < every / int(os.environ["WORLD_SIZE"]) + 4 * len(list(model.parameters()))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def whole(parameter: Any) -> Any:
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    digest = _digest(engine.module, whole)
    tokens = torch.arange(8).view(1, 8)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    assert bool(torch.isfinite(loss))
    engine.destroy()
    return digest
