"""A real run of transformers' Trainer with ZeRO-3: the DeepSpeed config alone chooses the backend.

transformers makes the process group, through accelerate, while it builds ``TrainingArguments`` and
before it reads the DeepSpeed config; on the CPU it does so with Gloo and without DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ranks
from harness.training import IMPORTS
from tests import hugging_face

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # DeepSpeed may compile its shared-memory operation first
]

CONFIG = {
    "comm_backend": "smddp",
    "smddp": {"timeout_seconds": 120},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}

PROGRAM = """
import os, sys, tempfile
import torch, torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments, set_seed

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}

arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    deepspeed=__CONFIG__,
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=8,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
print("backend", dist.get_backend())
set_seed(1)
model = GPTNeoXForCausalLM(
    GPTNeoXConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, use_cache=False,
    )
)
trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
trainer.train()
assert arguments.world_size == dist.get_world_size() == 2
engine = trainer.model_wrapped
assert engine.zero_optimization_stage() == 3 and engine.optimizer is not None
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("losses", *(f"{float(loss):.4f}" for loss in losses))
assert len(losses) == 8 and float(losses[-1]) < 0.9 * float(losses[0]), losses

if "deepspeed_smddp" in sys.modules:
    import deepspeed_smddp
    own = {row["collective"] for row in deepspeed_smddp.statistics() if row["calls"]}
    lost = {row["collective"] for row in deepspeed_smddp.fallback_ledger()}
    print("own", *sorted(own - lost))
backend = dist.get_backend()
dist.destroy_process_group()
if backend == "gloo":  # only the reference: torch's Gloo now and then aborts while Python ends
    sys.stdout.flush()
    os._exit(0)
"""


def train(config: object, imports: str = IMPORTS) -> dict[str, list[str]]:
    """The lines that rank 0 printed, by their first word. ``imports``: as of :func:`ranks.run`."""
    program = PROGRAM.replace("__CONFIG__", repr(config))
    output = ranks.run(program, 2, timeout=300, imports=imports)[0]
    lines = [line.split() for line in output.splitlines()]
    known = ("backend", "losses", "own")
    return {words[0]: words[1:] for words in lines if words and words[0] in known}


def test_the_config_alone_chooses_smddp_and_losses_equal_those_over_gloo() -> None:
    smddp = train(CONFIG, imports="")  # the program itself imports all, as a user's does
    assert smddp["backend"] == ["smddp"]
    assert {"all_gather", "reduce_scatter"} <= set(smddp["own"])
    gloo = train({key: value for key, value in CONFIG.items() if "smddp" not in (key, value)})
    assert gloo["backend"] == ["gloo"]
    for ours, theirs in zip(smddp["losses"], gloo["losses"], strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=2e-4)


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    assert train(str(path))["backend"] == ["smddp"]


def test_accelerates_launcher(tmp_path: Path) -> None:
    """The short form of ``make hugging-face-check``: a user's script by ``accelerate launch``."""
    place = hugging_face.Place(tmp_path)
    config = place.trainers_config("smddp")
    script = [str(hugging_face.SCRIPTS / "trainer.py"), str(place.model), *hugging_face.TRAINING]
    answer = place.run(hugging_face.launch(*hugging_face.with_deepspeed(config), *script))
    assert len(answer.losses) == hugging_face.STEPS
    assert answer.losses[-1] < 0.9 * answer.losses[0]
    assert answer.own >= {"all_gather", "reduce_scatter"}


def test_a_misspelt_backend_stops_training_arguments() -> None:
    with pytest.raises(AssertionError, match=r'did you mean "smddp"\? known: '):
        train({**CONFIG, "comm_backend": "smdpp"})
