"""What DeepSpeed's own config code makes of a config, in a world of any number of ranks.

For scripts that run in a copy of a program, with the program's Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def by_deepspeed(config: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The settings that DeepSpeed would train with.

    Args:
        config: as the program hands it to ``deepspeed.initialize``.
        replicas: data-parallel ranks.

    Raises:
        ValueError, AssertionError: DeepSpeed's, if it refuses the config.
    """
    from deepspeed.runtime import config as config_module

    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    # It asks DeepSpeed for nothing else, and a group of DeepSpeed's compiles an operation first.
    config_module.dist = SimpleNamespace(get_rank=lambda: 0)
    found = config_module.DeepSpeedConfig(dict(config), mpu=ranks)
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
