"""What sharding by degree needs of DeepSpeed, and which keys of a config it excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.deepspeed.sharding.shard_groups import KEY
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.upstream import versions

# Features of stage 3 that make groups of their own: the path in the config, and the values with
# which the feature is off.
_EXCLUDED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("zero_optimization.zero_hpz_partition_size", (None, 1)),
    ("zero_optimization.zero_quantized_gradients", (None, False)),
    ("zero_optimization.zenflow", (None,)),
    ("zero_optimization.offload_optimizer.super_offload", (None, False)),
    ("expert_parallel.enabled", (None, False)),
    ("compile.deepcompile", (None, False)),
)


def check_deepspeed() -> None:
    """Refuses a version of DeepSpeed that is not supported, or that lacks a name it should have.

    Raises:
        SmddpConfigError: names the version, or what is missing.
    """
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, stage3

    unsupported = versions.refusal("sharded_data_parallel_degree", deepspeed)
    if unsupported is not None:
        raise SmddpConfigError(f"{KEY} {unsupported}; install a known one, or set the degree to 0")
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    wanted = (
        (partition_parameters, ("dist", "GatheredParameters", "Init")),
        (optimizer, ("step", "_finalize_offload_gradient_accumulation", "_get_norm_groups")),
        (optimizer, ("get_fp32_grad_for_param", "_get_param_partition_group")),
        (
            DeepSpeedEngine,
            ("_load_zero_checkpoint", "_common_checkpoint_state", "_load_checkpoint"),
        ),
        (DeepSpeedEngine, ("_get_all_ckpt_names", "load_module_state_dict")),
    )
    for owner, names in wanted:
        for name in names:
            if not hasattr(owner, name):
                raise SmddpConfigError(
                    f"{KEY} needs {owner.__name__}.{name}, which this copy of DeepSpeed "
                    f"{deepspeed.__version__} lacks; install the released one, or set the degree "
                    "to 0"
                )


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a config with a key that does not go with a degree.

    Raises:
        SmddpConfigError: names the other key.
    """
    stage = ds_config.at(config, "zero_optimization.stage") or 0
    if stage != 3:
        raise SmddpConfigError(
            f'{KEY} needs "zero_optimization.stage": 3, and the DeepSpeed config has {stage}'
        )
    for path, idle in _EXCLUDED:
        if ds_config.at(config, path) not in idle:
            raise SmddpConfigError(
                f'{KEY} does not go with "{path}", which makes groups of its own; leave out one '
                "of the two"
            )
