"""``"auto"`` in a ZeRO-3 config: chosen before DeepSpeed reads the config, filled in as it does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import settings
from deepspeed_smddp.zero import ds_config, groups


def choose(config: Any) -> None:
    """Measures what the config leaves open; all ranks call it, with the default group made."""
    from deepspeed.accelerator import get_accelerator

    found = ds_config.read(config)
    if found is None or not dist.is_initialized() or get_accelerator().device_name() != "cpu":
        return
    if groups.is_ours(dist.group.WORLD):
        from deepspeed_smddp.tune import startup

        startup.tune(found, groups.resolve(None))


def install(deepspeed: Any) -> None:
    """Wraps the function that makes DeepSpeed's ZeRO settings out of the whole config."""
    module = deepspeed.runtime.config
    original = getattr(module, "get_zero_config", None)
    if original is None or list(inspect.signature(original).parameters) != ["param_dict"]:
        settings.warn_once(
            "zero auto",
            'smddp: this DeepSpeed reads "zero_optimization" in a way that is not known, so what '
            "it leaves open stays at DeepSpeed's defaults; `smddp tune` writes a config",
        )
        return

    @functools.wraps(original)
    def wrapper(param_dict: Any) -> Any:
        from deepspeed_smddp.tune import ds_config as tuned
        from deepspeed_smddp.tune import startup

        choice = startup.current()
        if choice is not None and isinstance(param_dict, Mapping):
            param_dict = tuned.fill_zero(param_dict, choice)
        return original(param_dict)

    module.get_zero_config = wrapper
