"""Megatron-DeepSpeed: its dataset, its arguments, its DeepSpeed config."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import hjson

from . import shipped
from .runs import (
    CHECKPOINT,
    HERE,
    RANKS,
    STEPS,
    Case,
    Run,
    copied,
    losses,
    read_ledger,
    start,
)

CASES = (
    Case("zero3", stage=3),
    Case("zero3-tp2", stage=3, tensor=2),
    Case("zero1-pp2", stage=1, pipe=2),
    Case("zero1-tp2-pp2", stage=1, tensor=2, pipe=2),
)
LOSS = r"iteration\s+(\d+)/\s*\d+ .*?lm loss: (\S+)"
ENTRY = "pretrain_gpt.py"
_MICRO_BATCH = 2
_BYTES = 256  # the vocabulary


class Program:
    """A copy of Megatron-DeepSpeed with a dataset; its own files are not changed.

    Args:
        source: a checkout; it is copied, as Megatron-DeepSpeed compiles into its folder.
        folder: for the copy, the dataset and the runs' files.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        self.code = copied(source, folder / "Megatron-DeepSpeed")

    def prepare(self, python: Path) -> None:
        """Makes a dataset of bytes with the program's own ``tools/preprocess_data.py``."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        with (data / "text.jsonl").open("w") as file:
            for source in sorted(library.glob("[a-d]*.py")):  # NullTokenizer reads numbers
                numbers = " ".join(map(str, source.read_bytes()))
                file.write(json.dumps({"text": numbers}) + "\n")
        command = [str(python), "tools/preprocess_data.py", "--workers", "1", "--append-eod"]
        command += ["--input", str(data / "text.jsonl"), "--output-prefix", str(data / "bytes")]
        command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(_BYTES)]
        command += ["--dataset-impl", "mmap"]
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, cwd=self.code, env=env, check=True, capture_output=True)

    def run(self, run: Run, case: Case, python: Path, port: int, limit: float) -> None:
        """Trains, and fills ``run``."""
        name = f"{run.deepspeed}-{case.name}-{run.backend}"
        checkpoints = self.folder / "checkpoints" / name
        stem = self.folder / (name + "-resumed" * run.resumed)
        if run.resumed:  # both files name the checkpoint to load
            (checkpoints / "latest").write_text(f"global_step{CHECKPOINT}")
            (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(CHECKPOINT))
        else:
            shutil.rmtree(checkpoints, ignore_errors=True)
        config = Path(f"{stem}.json")
        config.write_text(json.dumps(self.settings(case, run.backend), indent=1))
        env = {
            "REAL_PROGRAM": str(self.code / ENTRY),
            "REAL_STAND_INS": "megatron",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions" / run.deepspeed),
            "REAL_LEDGER": f"{stem}.ledger.{{rank}}.json",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it
        }
        launcher = [str(python), "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
        arguments = self.arguments(case, config, checkpoints)
        command = [*launcher, "--master_port", str(port), str(HERE / "cpu_rank.py"), *arguments]
        output, run.seconds = start(command, self.code, python, env, limit)
        Path(f"{stem}.log").write_text(output)
        run.losses = losses(output, LOSS)
        run.ledger = read_ledger(Path(f"{stem}.ledger.0.json"))
        shown = [Path(word).name if word.startswith("/") else word for word in arguments]
        run.command = " ".join(["deepspeed", "--num_gpus", str(RANKS), ENTRY, *shown])

    def check_shipped_configs(self, python: Path) -> list[str]:
        """What the program, or DeepSpeed after it, makes otherwise of files in ``ds_configs/``."""
        command, wanted = [str(python), str(HERE / "megatron_config.py")], {}
        for file in sorted([*shipped.FOLDER.glob("*.hjson"), *shipped.FOLDER.glob("*.json")]):
            given = json.loads(json.dumps(hjson.loads(file.read_text())))
            wanted[file.name] = given
            plain = self.folder / f"{file.stem}.json"
            plain.write_text(json.dumps(given))
            step = given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
            command += [str(plain), str(given.get("train_batch_size", step) // step)]
        return shipped.refused(command, self.code, "Megatron-DeepSpeed", wanted)

    def arguments(self, case: Case, config: Path, checkpoints: Path) -> list[str]:
        """The command line of ``pretrain_gpt.py``."""
        replicas = RANKS // (case.tensor * case.pipe)
        sizes: dict[str, Any] = {
            "tensor-model-parallel-size": case.tensor,
            "pipeline-model-parallel-size": case.pipe,
            "num-layers": 2,
            "hidden-size": 64,
            "num-attention-heads": 4,
            "seq-length": 64,
            "max-position-embeddings": 64,
            "micro-batch-size": _MICRO_BATCH,
            "global-batch-size": _MICRO_BATCH * replicas * case.pipe,
            "train-iters": STEPS,
            "lr": 1e-3,
            "min-lr": 1e-4,
            "lr-decay-style": "cosine",
            "lr-warmup-fraction": 0.1,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "data-path": self.folder / "data" / "bytes_text_document",
            "data-impl": "mmap",
            "split": "949,50,1",
            "tokenizer-type": "NullTokenizer",
            "vocab-size": _BYTES,
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

    def settings(self, case: Case, backend: str) -> dict[str, Any]:
        """``ds_configs/gpt-neox-65b.hjson`` with the sizes of this model."""
        ours = hjson.loads((shipped.FOLDER / "gpt-neox-65b.hjson").read_text())
        settings: dict[str, Any] = json.loads(json.dumps(ours))
        replicas = RANKS // (case.tensor * case.pipe)
        settings |= {
            "comm_backend": backend,
            "train_batch_size": _MICRO_BATCH * replicas * case.pipe,
            "train_micro_batch_size_per_gpu": _MICRO_BATCH,
            "gradient_accumulation_steps": case.pipe,
            "steps_per_print": STEPS,
        }
        zero = settings["zero_optimization"]
        zero |= {"stage": case.stage, "reduce_bucket_size": 500000}
        if case.stage == 3:
            zero["stage3_param_persistence_threshold"] = 100
            zero["stage3_prefetch_bucket_size"] = 50000
        else:
            for key in [key for key in zero if key.startswith("stage3_")]:
                del zero[key]
        if backend != "smddp":
            del settings["smddp"]
        return settings


# Kernels for GPUs, and checks of them.
_OFF = (
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-async-tensor-model-parallel-allreduce",
)
