"""The memory that `smddp plan` predicts against that of real steps with DeepSpeed on CPUs.

    python benchmarks/plan_memory.py --folder runs/plan-memory               # some minutes
    python benchmarks/plan_memory.py --folder runs/plan-memory --cases 1,2   # these only
    python benchmarks/plan_memory.py --folder runs/plan-memory --show        # the table

Measured: how far the resident memory of a rank rises during two steps above what it was before the
model was built and after steps of a tiny one, the largest of the ranks. Predicted: the parts of the
planner's page without the two allowances, which are of GPUs: a CPU has no allocator that keeps
blocks (glibc's is told to return each block of at least 128 KiB at once) and no context of CUDA.
What is offloaded is in the same memory: a rank's part of the host's counts as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_smddp.planning import hardware, model_shape, training_job
from deepspeed_smddp.planning.memory_use import memory_use

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-28-plan-memory"
HIDDEN = 768
LAYER = 12 * HIDDEN**2
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True)
class Case:
    """One job; ``kept``: parameters stay from the forward to the backward pass.

    ``offload``: "optimizer", or "both" (the parameters as well).
    """

    model: str
    ranks: int = 2
    sequence: int = 64
    batch: int = 1
    vocabulary: int = 256
    recomputation: str = "none"
    kept: bool = False
    stage: int = 3
    offload: str = ""

    def transformers_config(self) -> dict[str, Any]:
        """Of the model: four layers."""
        wide = {"gpt_neox": 4 * HIDDEN, "llama": 2048, "qwen3": 2560}[self.model]
        more = {"num_key_value_heads": 4, "head_dim": 64} if self.model == "qwen3" else {}
        return {
            "model_type": self.model,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 4,
            "num_attention_heads": 12,
            "intermediate_size": wide,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.sequence,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
            **more,
        }

    def ds_config(self) -> dict[str, Any]:
        """Buckets of one layer."""
        return {
            "comm_backend": "smddp",
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}},
            "zero_optimization": self._zero(),
            **({"zero_force_ds_cpu_optimizer": False} if self.offload else {}),
            "steps_per_print": 1_000_000_000,
        }

    def _zero(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": LAYER,
        }
        if self.stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": LAYER,
                "stage3_param_persistence_threshold": 10_000,
                "stage3_max_live_parameters": 3 * LAYER,
                "stage3_max_reuse_distance": 1_000_000_000 if self.kept else 0,
            }
        for part in {"": (), "optimizer": ("optimizer",), "both": ("optimizer", "param")}[
            self.offload
        ]:
            zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": False}
        return zero

    def planned(self) -> tuple[float, float]:
        """What the planner says, at least and at most."""
        shape = model_shape.of_transformers(self.transformers_config(), self.model)
        job = training_job.of_config(
            replace(shape, sequence=self.sequence),
            hardware.cluster("p4d"),
            self.ranks,
            self.ds_config(),
            recomputation=self.recomputation,
        )
        use = memory_use(job, on_cpu=True)
        host = [part.times(1 / self.ranks) for part in use.host.values()]
        return use.low + sum(of.low for of in host), use.high + sum(of.high for of in host)


CASES = (
    Case("gpt_neox"),
    Case("gpt_neox", ranks=3),
    Case("gpt_neox", kept=True),
    Case("gpt_neox", batch=2),
    Case("gpt_neox", batch=2, recomputation="full"),
    Case("gpt_neox", vocabulary=8192),
    Case("llama"),
    Case("gpt_neox", stage=1),
    Case("llama", stage=1),
    Case("gpt_neox", stage=2),
    Case("qwen3", stage=2),
    Case("qwen3"),
    Case("llama", offload="optimizer"),
    Case("qwen3", offload="both"),
    Case("gpt_neox", stage=2, offload="optimizer"),
    Case("llama", batch=8, vocabulary=16384, stage=2),
)


def run(case: Case, path: Path) -> None:
    """Trains; writes what the rank with the most memory needed."""
    text = {
        "model": case.transformers_config(),
        "ds_config": case.ds_config(),
        "sequence": case.sequence,
        "recomputation": case.recomputation,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(case.ranks)]
        command += [str(ROOT / "benchmarks" / "plan_memory_rank.py"), json.dumps(text), folder]
        env = os.environ | _ALLOCATOR | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise SystemExit(f"{path.name}: {ended.stdout[-2000:]}{ended.stderr[-4000:]}")
        ranks = [json.loads(of.read_text()) for of in Path(folder).glob("rank-*.json")]
    path.write_text(json.dumps({"case": text, "ranks": ranks}, indent=1) + "\n")


def peak(path: Path) -> float:
    """Bytes that the rank with the most needed."""
    return float(max(rank["peak"] for rank in json.loads(path.read_text())["ranks"]))


def table(folder: Path) -> str:
    """Markdown: a row for each case that the folder has."""
    rows = [
        "| case | model | stage, offloaded | ranks | tokens per rank | vocabulary | recomputation "
        "| kept gathered | planned, MB | measured, MB | error of the middle |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, case in enumerate(CASES, 1):
        path = folder / f"case-{number}.json"
        if not path.exists():
            continue
        (low, high), measured = case.planned(), peak(path)
        what = f"{case.stage}{', ' + case.offload if case.offload else ''}"
        rows.append(
            f"| {number} | {case.model} | {what} | {case.ranks} | {case.sequence * case.batch} | "
            f"{case.vocabulary} | {case.recomputation} | {'yes' if case.kept else 'no'} | "
            f"{low / 1e6:.0f} to {high / 1e6:.0f} | {measured / 1e6:.0f} | "
            f"{(low + high) / 2 / measured - 1:+.1%} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of case-1.json and so on")
    parser.add_argument("--cases", default="", help="numbers with commas; default: all")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = [int(n) for n in args.cases.split(",") if n] or list(range(1, len(CASES) + 1))
    for number in [] if args.show else chosen:
        run(CASES[number - 1], args.folder / f"case-{number}.json")
    print(table(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
