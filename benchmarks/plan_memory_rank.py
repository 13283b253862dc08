"""One rank that trains two steps and writes how far its memory rose; for plan_memory.py.

    torchrun ... benchmarks/plan_memory_rank.py CASE FOLDER

CASE is JSON: the config of the model (transformers), the config of DeepSpeed, and whether layers
are computed again. The rank writes FOLDER/rank-N.json: bytes, and the parameters of the model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

STEPS = 2  # the optimizer's states exist from the first one on


def resident() -> int:
    """Bytes of this process's own memory now, without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return (int(values["RssAnon"]) + int(values["RssShmem"])) << 10


class Peak:
    """The most that was resident, looked at every few milliseconds by a thread."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.003)


def train(engine: Any, vocabulary: int, shape: tuple[int, int], steps: int) -> None:
    """Some steps on random tokens."""
    for _ in range(steps):
        tokens = torch.randint(0, vocabulary, shape)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        del loss
        engine.step()


def make(model: dict[str, Any], recomputation: str, ds_config: dict[str, Any]) -> tuple[Any, int]:
    """The engine of a model, and the parameters of the model."""
    config = transformers.AutoConfig.for_model(**model)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if recomputation == "full":
        made.gradient_checkpointing_enable()
    parameters = sum(p.numel() for p in made.parameters())
    engine, *_ = deepspeed.initialize(
        model=made, model_parameters=made.parameters(), config=ds_config
    )
    return engine, parameters


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed("smddp", verbose=False)
    model, ds_config = case["model"], case["ds_config"]
    shape = (ds_config["train_micro_batch_size_per_gpu"], case["sequence"])
    # What the libraries take, whatever the model: modules, kernels, connections.
    small = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), 1 << 16)
    zero = ds_config["zero_optimization"] | small
    tiny = model | {"hidden_size": 96, "intermediate_size": 128, "vocab_size": 64}
    engine, _ = make(tiny, case["recomputation"], ds_config | {"zero_optimization": zero})
    train(engine, 64, shape, STEPS)
    gc.collect()
    before = resident()
    engine, parameters = make(model, case["recomputation"], ds_config)
    gc.collect()
    peak = Peak()
    train(engine, model["vocab_size"], shape, STEPS)
    found = {"parameters": parameters, "before": before, "peak": peak.bytes - before}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
