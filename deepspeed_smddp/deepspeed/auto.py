"""``"auto"`` in a ZeRO-3 config: chosen before DeepSpeed reads it, filled in while it reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.deepspeed import groups
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.tuning import auto_keys, startup
from deepspeed_smddp.upstream import source, wrapping

FEATURE = "bucket sizes"


def choose(config: Mapping[str, Any]) -> None:
    """Measures what the config leaves open; all ranks call it, after the default group exists."""
    device = _device() if dist.is_initialized() else None
    if device is not None and backend.serves(dist.group.WORLD, device):
        _install()
        startup.tune(config, groups.resolve(None), device)


def _device() -> torch.device | None:
    """Where DeepSpeed will put this rank's parameters; None if it is not known, or not smddp's.

    DeepSpeed makes that GPU the current one only later.
    """
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    if name == "cpu":
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK", "")
    return torch.device(f"cuda:{local_rank}") if name == "cuda" and local_rank.isdigit() else None


def _install() -> None:
    # Wraps the function that makes DeepSpeed's ZeRO settings out of the whole config.
    from deepspeed.runtime import config

    if source.known(FEATURE) and not wrapping.is_wrapped(config.get_zero_config):
        wrapping.wrap(config, "get_zero_config", _fill_in)


def _fill_in(original: Callable[..., Any], param_dict: Any, *args: Any, **kwargs: Any) -> Any:
    device = _device()
    ours = device is not None and backend.serves(groups.resolve(None), device)
    choice = startup.current() if ours else None
    if choice is not None and isinstance(param_dict, Mapping):
        param_dict = auto_keys.fill_zero(param_dict, choice)
    return original(param_dict, *args, **kwargs)
