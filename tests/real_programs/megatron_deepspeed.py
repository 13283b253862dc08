"""Megatron-DeepSpeed: its dataset, its arguments, its DeepSpeed config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hjson

from .program import CONFIGS, HERE, Program
from .runs import CHECKPOINT, RANKS, STEPS, Case, Run

_MICRO_BATCH = 2
_TOKENIZER = {"tokenizer-type": "NullTokenizer", "vocab-size": 256}  # bytes
# Kernels for GPUs, and checks of them.
_OFF = (
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-async-tensor-model-parallel-allreduce",
)


class Megatron(Program):
    name, title, entry = "megatron", "Megatron-DeepSpeed", "pretrain_gpt.py"
    cases = (
        Case("zero3", stage=3),
        Case("zero3-tp2", stage=3, tensor=2),
        Case("zero1-pp2", stage=1, pipe=2),
        Case("zero1-tp2-pp2", stage=1, tensor=2, pipe=2),
    )
    loss = r"iteration\s+(\d+)/\s*\d+ .*?lm loss: (\S+)"
    preprocess = (
        *("tools/preprocess_data.py", "--workers=1"),
        *(f"--{key}={value}" for key, value in _TOKENIZER.items()),
    )

    @staticmethod
    def text_of(file: Path) -> str:
        return " ".join(map(str, file.read_bytes()))  # NullTokenizer reads numbers

    def command(
        self, case: Case, run: Run, config: Path, checkpoints: Path, port: int
    ) -> tuple[list[str], str]:
        config.write_text(json.dumps(settings(case, run.backend), indent=1))
        arguments = self.arguments(case, config, checkpoints)
        launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
        launcher += ["--master_port", str(port), str(HERE / "cpu_rank.py")]
        shown = [Path(word).name if word.startswith("/") else word for word in arguments]
        shown = ["deepspeed", "--num_gpus", str(RANKS), self.entry, *shown]
        return [*launcher, *arguments], " ".join(shown)

    def arguments(self, case: Case, config: Path, checkpoints: Path) -> list[str]:
        """The command line of ``pretrain_gpt.py``."""
        sizes: dict[str, Any] = {
            "tensor-model-parallel-size": case.tensor,
            "pipeline-model-parallel-size": case.pipe,
            "num-layers": 2,
            "hidden-size": 64,
            "num-attention-heads": 4,
            "seq-length": 64,
            "max-position-embeddings": 64,
            "micro-batch-size": _MICRO_BATCH,
            "global-batch-size": batch(case),
            "train-iters": STEPS,
            "lr": 1e-3,
            "min-lr": 1e-4,
            "lr-decay-style": "cosine",
            "lr-warmup-fraction": 0.1,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "data-path": self.data / "bytes_text_document",
            "data-impl": "mmap",
            "split": "949,50,1",
            **_TOKENIZER,
            "log-interval": 1,
            "eval-interval": 1000,
            "eval-iters": 0,
            "save-interval": CHECKPOINT,
            "save": checkpoints,
            "load": checkpoints,
            "zero-stage": case.stage,
            "deepspeed_config": config,
        }
        words = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
        words += ["--deepspeed", "--bf16", "--use-cpu-initialization", *_OFF]
        return words + ["--no-pipeline-parallel"] * (case.pipe == 1)

    def shipped(self) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        for file in sorted([*CONFIGS.glob("*.hjson"), *CONFIGS.glob("*.json")]):
            given = plain(file)
            copy = self.folder / file.with_suffix(".json").name
            copy.write_text(json.dumps(given))
            step = given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
            yield copy, given.get("train_batch_size", step) // step, given


def plain(file: Path) -> dict[str, Any]:
    """The settings of a JSON or hjson file."""
    found: dict[str, Any] = json.loads(json.dumps(hjson.loads(file.read_text())))
    return found


def batch(case: Case) -> int:
    """Of all ranks together."""
    return _MICRO_BATCH * RANKS // case.tensor


def settings(case: Case, backend: str) -> dict[str, Any]:
    """``ds_configs/gpt-neox-65b.hjson`` with the sizes of this model."""
    found = plain(CONFIGS / "gpt-neox-65b.hjson") | {
        "comm_backend": backend,
        "train_batch_size": batch(case),
        "train_micro_batch_size_per_gpu": _MICRO_BATCH,
        "gradient_accumulation_steps": case.pipe,
        "steps_per_print": STEPS,
    }
    zero = {k: v for k, v in found["zero_optimization"].items() if not k.startswith("stage3_")}
    if case.stage == 3:
        zero = found["zero_optimization"] | {
            "stage3_param_persistence_threshold": 100,
            "stage3_prefetch_bucket_size": 50000,
        }
    found["zero_optimization"] = zero | {"stage": case.stage, "reduce_bucket_size": 500000}
    if backend != "smddp":
        del found["smddp"]
    return found
