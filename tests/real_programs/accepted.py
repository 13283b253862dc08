"""Prints the DeepSpeed configs that a program makes of files, and what DeepSpeed makes of those.

`accepted.py neox|megatron FILE REPLICAS [FILE REPLICAS]...` runs in a copy of the program, as a
script of the program's Python. A line for each file: {"passed": what the program hands to
`deepspeed.initialize`, "accepted": the settings that DeepSpeed would train with}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stand_ins  # beside this file; GPT-NeoX has "tests", too

sys.path[0] = str(Path.cwd())


def neox(file: str, replicas: int) -> Any:
    from megatron.neox_arguments import NeoXArgs

    return NeoXArgs.from_ymls([file], {"global_num_gpus": replicas}).deepspeed_config


def megatron(file: str, replicas: int) -> Any:
    from megatron import arguments, global_vars, training

    sys.argv[1:] = ["--deepspeed", "--deepspeed_config", file]
    global_vars.set_args(arguments.parse_args())  # as megatron.initialize does
    return training._create_ds_config_dict()


def by_deepspeed(config: dict[str, Any], replicas: int) -> dict[str, Any]:
    """DeepSpeed's own reading of a config, with so many data-parallel ranks; it raises its own."""
    from deepspeed.runtime import config as config_module

    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    # It asks DeepSpeed for nothing else, and a group of DeepSpeed's compiles an operation first.
    config_module.dist = SimpleNamespace(get_rank=lambda: 0)
    found = config_module.DeepSpeedConfig(config, mpu=ranks)
    zero = found.zero_config
    return {
        "train_batch_size": found.train_batch_size,
        "train_micro_batch_size_per_gpu": found.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "gradient_clipping": found.gradient_clipping,
        "zero_optimization": {
            "stage": int(zero.stage),
            "reduce_bucket_size": zero.reduce_bucket_size,
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_param_persistence_threshold": zero.param_persistence_threshold,
            "stage3_max_live_parameters": zero.max_live_parameters,
        },
    }


def main() -> None:
    program, *pairs = sys.argv[1:]
    if program == "megatron":  # imports what DeepSpeed has dropped
        stand_ins.megatron()
    for file, replicas in zip(pairs[::2], map(int, pairs[1::2]), strict=True):
        passed = {"neox": neox, "megatron": megatron}[program](file, replicas)
        print(json.dumps({"passed": passed, "accepted": by_deepspeed(dict(passed), replicas)}))


if __name__ == "__main__":
    main()
