"""``"auto"`` in a ZeRO-3 config: chosen before DeepSpeed reads it, filled in while it reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import ds_config, settings
from deepspeed_smddp.tune import auto_keys, startup
from deepspeed_smddp.upstream import wrapping
from deepspeed_smddp.upstream.wrapping import Call
from deepspeed_smddp.zero import groups


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Chooses before ``deepspeed.initialize`` reads its config."""
    choose(ds_config.of_initialize(call.arguments))
    yield


@contextmanager
def around_zero_init(call: Call) -> Iterator[None]:
    """Chooses before ``zero.Init`` reads its config."""
    choose(ds_config.of_zero_init(call.arguments))
    yield


def choose(config: Any) -> None:
    """Measures what the config leaves open; all ranks call it, after the default group exists."""
    from deepspeed.accelerator import get_accelerator

    found = ds_config.read(config)
    if found is None or not dist.is_initialized() or get_accelerator().device_name() != "cpu":
        return
    if groups.is_ours(dist.group.WORLD):
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

    wrapping.wrap(module, "get_zero_config", _fill_in)


def _fill_in(original: Callable[[Any], Any], param_dict: Any) -> Any:
    choice = startup.current()
    if choice is not None and isinstance(param_dict, Mapping):
        param_dict = auto_keys.fill_zero(param_dict, choice)
    return original(param_dict)
