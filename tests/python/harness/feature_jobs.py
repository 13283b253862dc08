"""Features of DeepSpeed that call collectives in ways of their own: losses, ledger and sentences.

``run`` returns for each case what it computed and its operations by collective and path. A case is
a function of the backend.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import model_jobs, zero

Case = Callable[[str], list[float]]


def muon(stage: int) -> Case:
    def train(backend: str) -> list[float]:
        section = {"stage": stage, "reduce_scatter": False}
        optimizer = {"type": "Muon", "params": {"lr": 1e-2}}
        return zero.train(backend, section, optimizer=optimizer, bf16={"enabled": True})

    return train


def inference(backend: str) -> list[float]:
    """No optimizer: parameters are gathered for each forward pass, and for each token generated."""
    torch.manual_seed(5)
    model = model_jobs.llama()
    section = {"stage": 3, "stage3_param_persistence_threshold": 30}
    settings = {k: v for k, v in zero.config(backend, section).items() if k != "optimizer"}
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.module.eval()
    rank = dist.get_rank()
    tokens = torch.arange(6).view(1, 6) + rank
    with torch.no_grad():
        scores = engine(input_ids=tokens).logits.double().sum()
        # Ranks end at different lengths; with synced_gpus all take part until the last one ends.
        text = engine.module.generate(
            tokens,
            max_new_tokens=4 + 3 * rank,
            do_sample=False,
            synced_gpus=True,
            use_cache=True,
            pad_token_id=0,
        )
    engine.destroy()
    return [zero.mean(part) for part in (scores, text.double().sum(), torch.tensor(text.shape[1]))]


def save_16bit(backend: str) -> list[float]:
    """The whole model in one file, gathered by ``stage3_gather_16bit_weights_on_model_save``."""
    section = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    with zero.engine_of(zero.blocks(), zero.config(backend, section, bf16={"enabled": True})) as e:
        losses = zero.fit(e)
        folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        assert e.save_16bit_model(folders[0])
        dist.barrier()
        saved = torch.load(Path(folders[0], "pytorch_model.bin"))
    whole = zero.blocks().state_dict()
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in whole.items()}
    return [*losses, float(sum(t.double().abs().sum() for t in saved.values()))]


def quantized_gradients(backend: str) -> list[float]:
    section = {"stage": 3, "zero_quantized_gradients": True}
    return zero.train(backend, section, bf16={"enabled": True}, compile={"deepcompile": True})


CASES: dict[str, Case] = {
    "muon_2": muon(2),
    "muon_3": muon(3),
    "inference": inference,
    "save_16bit": save_16bit,
    "quantized_gradients": quantized_gradients,
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    import deepspeed_smddp
    from deepspeed_smddp.errors import logger

    backend = job["backend"]
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    answers: dict[str, Any] = {}
    for name in job["cases"]:
        if backend == "smddp":
            deepspeed_smddp.reset_statistics()
        said.clear()
        try:
            answer: dict[str, Any] = {"found": CASES[name](backend)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        rows = deepspeed_smddp.statistics() if backend == "smddp" else []
        answers[name] = {
            **answer,
            "said": list(said),
            "operations": {f"{r['collective']} by {r['path']}": r["calls"] for r in rows},
        }
    dist.destroy_process_group()
    return answers
