"""``"auto"`` in a ZeRO-3 config: chosen before DeepSpeed reads it, filled in while it reads it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import operations
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import warn_once
from deepspeed_smddp.tuning import auto_keys, measure
from deepspeed_smddp.tuning.choice import SMDDP_KEYS, Choice
from deepspeed_smddp.tuning.choice import choose as choose_sizes
from deepspeed_smddp.upstream import source, wrapping

FEATURE = "bucket sizes"

_choice: Choice | None = None  # of this process


def choose(config: Mapping[str, Any]) -> None:
    """Measures the network and chooses what the config leaves open, and says it once.

    All ranks call it, after the default group exists, and come to the same choice. It measures
    nothing if nothing is open, the config is not of ZeRO-3, or there is one rank.
    """
    global _choice
    device = _device() if dist.is_initialized() else None
    group: Any = dist.group.WORLD
    if device is None or not backend.serves(group, device):
        return
    _install()
    section = settings.current().section
    open_keys = [k for k in auto_keys.open_keys(config) if getattr(section, k, "auto") == "auto"]
    if not open_keys or group.size() < 2:
        return
    began = time.perf_counter()
    counted = backend.statistics()
    network, origin = measure.find(group, device)
    if not counted:
        backend.reset_statistics()  # the counters are to show training alone
    _choice = choice = choose_sizes(network, auto_keys.element_size(config), device.type == "cuda")
    settings.set_measured({key: getattr(choice, key) for key in SMDDP_KEYS})
    how = f"{origin} in {time.perf_counter() - began:.2f} s"
    text = ", ".join(f"{key} {getattr(choice, key)}" for key in open_keys)
    # WARNING is the lowest level that a program without logging set-up shows.
    warn_once(text, f"smddp: chosen for this network, {how} (smddp tune says why): {text}")


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

    if source.known(FEATURE):
        wrapping.wrap(config, "get_zero_config", _fill_in)


def _fill_in(original: Callable[..., Any], param_dict: Any, *args: Any, **kwargs: Any) -> Any:
    device = _device()
    ours = device is not None and backend.serves(operations.resolve(None), device)
    if ours and _choice is not None and isinstance(param_dict, Mapping):
        param_dict = auto_keys.fill_zero(param_dict, _choice)
    return original(param_dict, *args, **kwargs)
