"""GPT-NeoX: its dataset, its YAML, its command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .program import CONFIGS, HERE, Program
from .runs import CHECKPOINT, RANKS, STEPS, Case, Run


class Neox(Program):
    name, title, entry = "neox", "GPT-NeoX", "train.py"
    cases = (
        Case("zero3", stage=3),
        Case("zero3-fp32", stage=3, precision="fp32", resume=False),
        Case("zero1-mp2", stage=1, tensor=2),
        Case("zero1-pp2", stage=1, pipe=2),
    )
    loss = r"iteration\s+(\d+)/\s*\d+ .*?lm_loss: (\S+)"
    text_of = staticmethod(Path.read_text)

    def __init__(self, source: Path, folder: Path) -> None:
        super().__init__(source, folder)
        tokenizer = self.data / "tokenizer.json"
        _byte_tokenizer().save(str(tokenizer))
        self.preprocess = ["tools/datasets/preprocess_data.py", "--tokenizer-type=HFTokenizer"]
        self.preprocess.append(f"--vocab={tokenizer}")

    def command(
        self, case: Case, run: Run, config: Path, checkpoints: Path, port: int
    ) -> tuple[list[str], str]:
        places = {"master_port": port, "save": str(checkpoints), "load": str(checkpoints)}
        if run.resumed:
            places["iteration"] = CHECKPOINT
        config = config.with_suffix(".yml")
        settings = self.settings(case, run.backend) | places
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        command = ["deepy.py", str(HERE / "cpu_rank.py"), str(config)]
        return command, f"python deepy.py {self.entry} {config.name}"

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
            "data_path": str(self.data / "bytes_text_document"),
            "data_impl": "mmap",
            "split": "949,50,1",
            "tokenizer_type": "HFTokenizer",
            "vocab_file": str(self.data / "tokenizer.json"),
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

    def shipped(self) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        file = CONFIGS / "gpt-neox-65b.yml"
        given = yaml.safe_load(file.read_text())
        yield (
            file,
            512,
            given["deepspeed_extra_args"]
            | {
                "zero_optimization": given["zero_optimization"],
                "train_batch_size": 512 * given["train_micro_batch_size_per_gpu"],
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
            },
        )


def _byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    return made
