"""Programs of Hugging Face's libraries and Lightning, started as by users, with tiny models.

The scripts in ``scripts/`` name no package of this repository, and no backend (Lightning's has it
as an argument): what chooses smddp is the DeepSpeed config or the launcher's variables, as for a
user. ``make hugging-face-check`` runs all (``test_command_lines.py``); ``make test`` runs one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
from harness.ports import free_port
from tests import jobs

SCRIPTS = Path(__file__).resolve().parent / "scripts"
RANKS = 2
STEPS = 4
RATE = 1e-2
TRAINING = [
    *(f"--max_steps={STEPS}", "--per_device_train_batch_size=4", f"--learning_rate={RATE}"),
    *("--logging_steps=1", "--save_strategy=no", "--report_to=none", "--use_cpu"),
]
# The variables by which SageMaker's launcher selects smddp in accelerate, which then expects GPUs.
SAGEMAKER = {
    "ACCELERATE_USE_SAGEMAKER": "true",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
}
FSDP2 = [
    *("--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"),
    "--fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer",
]
ZERO3 = {"all_gather", "reduce_scatter"}


# Of every process: rank 0 of a group of smddp leaves its counters.
_LEDGER = """
import atexit, json, sys

@atexit.register
def leave():
    backend = sys.modules.get("deepspeed_smddp.distributed.backend")
    if backend is not None and backend.default_rank() == 0:
        with open("LEDGER", "w") as file:
            json.dump({"rows": backend.statistics()}, file)
"""


@dataclass
class Answer:
    """What a job left: the losses that it told, and rank 0's operations by path, if smddp's."""

    losses: list[float]  # the Trainer's log, then each rank's
    operations: dict[str, set[str]]
    output: str

    @property
    def own(self) -> set[str]:
        """The collectives that smddp carried out itself."""
        return {
            c for path, found in self.operations.items() if "fallback" not in path for c in found
        }


class Place:
    """A folder with a model, a tokenizer, a data set and DeepSpeed configs, all made here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.data = folder / "model", folder / "data"
        _make_model(self.model)
        self.data.mkdir()
        lines = [" ".join(str(n + i) for i in range(12)) for n in range(64)]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (self.data / "train.jsonl").write_text(text)

    def config(self, backend: str, **more: Any) -> str:
        """The path of a ZeRO-3 config; ``more`` are its other keys."""
        # Gloo is named as well: without a key, on CPUs, transformers makes the group behind
        # DeepSpeed's back, and zero.Init then counts one rank.
        config = {"comm_backend": backend, "zero_optimization": {"stage": 3}, **more}
        path = self.folder / f"{backend}-{len(list(self.folder.iterdir()))}.json"
        path.write_text(json.dumps(config))
        return str(path)

    def trainers_config(self, backend: str) -> str:
        """A config for transformers' Trainer, which fills in what is "auto"."""
        return self.config(
            backend,
            train_micro_batch_size_per_gpu="auto",
            gradient_accumulation_steps="auto",
            train_batch_size="auto",
            optimizer={"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        )

    def run(self, command: list[str], limit: float = 200, **variables: str) -> Answer:
        """Runs a command of this environment; raises JobError if it fails."""
        ledger = self.folder / "ledger.json"
        ledger.unlink(missing_ok=True)
        (self.folder / "sitecustomize.py").write_text(_LEDGER.replace("LEDGER", str(ledger)))
        program = Path(sys.executable).with_name(command[0])
        env = ranks.environment(
            HF_HOME=str(self.folder / "home"),
            PYTHONPATH=str(self.folder),  # with sitecustomize.py
            **variables,
        )
        output = jobs.run(
            [str(program), *command[1:]], self.folder, self.folder / "log", limit, env
        )
        told = re.findall(r"(?:'rank': (\d), )?'loss': '?([\d.]+)", output)
        losses = [float(loss) for _, loss in sorted(told, key=lambda one: one[0])]
        operations: dict[str, set[str]] = {}
        if ledger.exists():
            for row in json.loads(ledger.read_text())["rows"]:
                operations.setdefault(row["path"], set()).add(row["collective"])
        return Answer(losses, operations, output)


def launch(*arguments: str) -> list[str]:
    """``accelerate launch`` on the ranks of this machine."""
    port = f"--main_process_port={free_port()}"
    return ["accelerate", "launch", f"--num_processes={RANKS}", port, *arguments]


def with_deepspeed(config: str) -> list[str]:
    """accelerate's arguments for a DeepSpeed config."""
    return ["--use_deepspeed", f"--deepspeed_config_file={config}"]


def by(launcher: str, config: str, script: str, *arguments: str) -> list[str]:
    """The command of a script of ``scripts/`` that reads ``config``, by one of the launchers."""
    job = [str(SCRIPTS / script), *arguments]
    if launcher == "accelerate":
        return launch(*with_deepspeed(config), *job)
    port = free_port()
    start = {
        "torchrun": ["torchrun", f"--nproc-per-node={RANKS}", f"--master-port={port}"],
        "deepspeed": ["deepspeed", f"--num_gpus={RANKS}", f"--master_port={port}"],
    }
    return [*start[launcher], *job, config]


def trainer_by(launcher: str, place: Place, backend: str, *more: str) -> list[str]:
    """The command of ``scripts/trainer.py`` with a ZeRO-3 config that names the backend."""
    config = place.trainers_config(backend)
    if launcher != "accelerate":
        config = f"--deepspeed={config}"
    return by(launcher, config, "trainer.py", str(place.model), *more, *TRAINING)


def check(place: Place, command: Callable[[Place, str], list[str]], own: set[str] = ZERO3) -> None:
    """Over smddp, which carries the collectives ``own``, the losses are those over Gloo."""
    ours, theirs = (place.run(command(place, backend)) for backend in ("smddp", "gloo"))
    print(f"smddp {ours.losses}\ngloo  {theirs.losses}")
    assert len(ours.losses) >= STEPS
    assert ours.losses == theirs.losses
    assert ours.losses[STEPS - 1] < ours.losses[0]
    assert ours.own >= own
    assert not theirs.operations


def _make_model(folder: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(entries),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=len(entries) - 2,
        pad_token_id=len(entries) - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
