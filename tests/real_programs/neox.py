"""GPT-NeoX: its dataset, its YAML, its command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
    Case("zero3-fp32", stage=3, precision="fp32", resume=False),
    Case("zero1-mp2", stage=1, tensor=2),
    Case("zero1-pp2", stage=1, pipe=2),
)
LOSS = r"iteration\s+(\d+)/\s*\d+ .*?lm_loss: (\S+)"
ENTRY = "train.py"


class Program:
    """A copy of GPT-NeoX with a dataset; its own files are not changed.

    Args:
        source: a checkout; it is copied, as GPT-NeoX compiles into its folder.
        folder: for the copy, the dataset and the runs' files.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        self.code = copied(source, folder / "gpt-neox")

    def prepare(self, python: Path) -> None:
        """Makes a dataset of bytes with GPT-NeoX's own ``preprocess_data.py``."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        _byte_tokenizer().save(str(data / "tokenizer.json"))
        library = Path(sysconfig.get_path("stdlib"))
        with (data / "text.jsonl").open("w") as file:
            for source in sorted(library.glob("[a-d]*.py")):
                file.write(json.dumps({"text": source.read_text()}) + "\n")
        command = [str(python), "tools/datasets/preprocess_data.py"]
        command += ["--input", str(data / "text.jsonl"), "--output-prefix", str(data / "bytes")]
        command += ["--tokenizer-type", "HFTokenizer", "--vocab", str(data / "tokenizer.json")]
        command += ["--dataset-impl", "mmap", "--append-eod"]
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, cwd=self.code, env=env, check=True, capture_output=True)

    def run(self, run: Run, case: Case, python: Path, port: int, limit: float) -> None:
        """Trains, and fills ``run``."""
        name = f"{run.deepspeed}-{case.name}-{run.backend}"
        checkpoints = self.folder / "checkpoints" / name
        stem = self.folder / (name + "-resumed" * run.resumed)
        settings = self.settings(case, run.backend) | {
            "master_port": port,
            "save": str(checkpoints),
            "load": str(checkpoints),
        }
        if run.resumed:
            settings["iteration"] = CHECKPOINT
        else:
            shutil.rmtree(checkpoints, ignore_errors=True)
        config = Path(f"{stem}.yml")
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        env = {
            "REAL_PROGRAM": str(self.code / ENTRY),
            "REAL_STAND_INS": "neox",
            "MASTER_PORT": str(port),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions" / run.deepspeed),
            "REAL_LEDGER": f"{stem}.ledger.{{rank}}.json",
        }
        command = [str(python), "deepy.py", str(HERE / "cpu_rank.py"), str(config)]
        output, run.seconds = start(command, self.code, python, env, limit)
        Path(f"{stem}.log").write_text(output)
        run.losses = losses(output, LOSS)
        run.ledger = read_ledger(Path(f"{stem}.ledger.0.json"))
        run.command = f"python deepy.py {ENTRY} {config.name}"

    def settings(self, case: Case, backend: str) -> dict[str, Any]:
        """GPT-NeoX's YAML of a case."""
        zero: dict[str, Any] = {
            "stage": case.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500000,
        }
        if case.stage == 3:
            zero["stage3_param_persistence_threshold"] = 100
            zero["stage3_prefetch_bucket_size"] = 50000
        extra: dict[str, Any] = {"comm_backend": backend}
        if case.precision == "bf16" and case.pipe > 1:  # GPT-NeoX warns of anything else
            extra["data_types"] = {"grad_accum_dtype": "fp32"}
        return {
            "distributed_backend": backend,
            "pipe_parallel_size": case.pipe if case.pipe > 1 else 0,
            "model_parallel_size": case.tensor,
            "num_gpus": RANKS,
            "global_num_gpus": RANKS,
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 64,
            "max_position_embeddings": 64,
            "norm": "layernorm",
            "pos_emb": "rotary",
            "no_weight_tying": True,
            "scaled_upper_triang_masked_softmax_fusion": False,
            "bias_gelu_fusion": False,
            "rope_fusion": False,
            "layernorm_fusion": False,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8},
            },
            "min_lr": 1e-4,
            "zero_optimization": zero,
            "deepspeed_extra_args": extra,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2 if case.pipe > 1 else 1,
            "data_path": str(self.folder / "data" / "bytes_text_document"),
            "data_impl": "mmap",
            "split": "949,50,1",
            "tokenizer_type": "HFTokenizer",
            "vocab_file": str(self.folder / "data" / "tokenizer.json"),
            "hidden_dropout": 0,
            "attention_dropout": 0,
            "weight_decay": 0.01,
            "precision": {"bf16": "bfloat16", "fp32": "fp32"}[case.precision],
            "train_iters": STEPS,
            "lr_decay_iters": STEPS,
            "lr_decay_style": "cosine",
            "warmup": 0.1,
            "checkpoint_factor": CHECKPOINT,
            "eval_interval": 1000,
            "eval_iters": 0 if case.pipe > 1 else 1,
            "log_interval": 1,
            "steps_per_print": STEPS,
        }

    def check_shipped_configs(self, python: Path) -> list[str]:
        """What GPT-NeoX, or DeepSpeed after it, makes otherwise of its file in ``ds_configs/``."""
        file = shipped.FOLDER / "gpt-neox-65b.yml"
        given = yaml.safe_load(file.read_text())
        wanted = given["deepspeed_extra_args"] | {
            "zero_optimization": given["zero_optimization"],
            "train_batch_size": 512 * given["train_micro_batch_size_per_gpu"],
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
        }
        command = [str(python), str(HERE / "neox_config.py"), str(file), "512"]
        return shipped.refused(command, self.code, "GPT-NeoX", {file.name: wanted})


def _byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    return made
