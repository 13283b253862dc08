"""Puts this package in front of functions of DeepSpeed, accelerate and transformers.

``smddp_autoload`` calls these functions once ``deepspeed``, ``accelerate.utils.deepspeed`` and
``transformers.training_args`` have been imported. If a version is not supported or a signature is
not the expected one, the module is left as it is and one warning says so.
"""

from __future__ import annotations

from typing import Any

from deepspeed_smddp.deepspeed import comm_backend, wrapped_calls
from deepspeed_smddp.errors import logger
from deepspeed_smddp.upstream import versions
from deepspeed_smddp.upstream.wrapping import is_wrapped, missing_argument, surround


def hook_deepspeed(deepspeed: Any) -> None:
    """Wraps ``initialize``, ``zero.Init.__init__`` and ``init_distributed``.

    They read the config, and pass all arguments on as they are unless smddp is chosen.
    """
    unsupported = versions.refusal("comm_backend", deepspeed)
    if unsupported is not None:
        _leave("deepspeed", f"that {unsupported}")
        return
    init_type = deepspeed.zero.Init
    init_distributed = deepspeed.comm.comm.init_distributed
    checks = (
        (deepspeed.initialize, ("args", "config", "config_params", "dist_init_required")),
        (init_type.__init__, ("config_dict_or_path", "config")),
        (init_distributed, ("dist_backend", "timeout", "config", "dist_init_required")),
    )
    for function, names in checks:
        missing = missing_argument(function, names)
        if missing:
            _leave("deepspeed", f"{function.__qualname__} has no argument {missing}")
            return
    # importlib.reload(deepspeed) replaces some of them.
    if not is_wrapped(deepspeed.initialize):
        deepspeed.initialize = surround(deepspeed.initialize, wrapped_calls.around_initialize)
    if not is_wrapped(init_type.__init__):
        init_type.__init__ = surround(init_type.__init__, wrapped_calls.around_zero_init)
    if is_wrapped(init_distributed):
        return
    wrapped = surround(init_distributed, wrapped_calls.around_init_distributed)
    for module in (
        deepspeed,
        deepspeed.comm,
        deepspeed.comm.comm,
        deepspeed.runtime.zero.partition_parameters,
    ):
        if getattr(module, "init_distributed", None) is init_distributed:
            module.init_distributed = wrapped


def hook_accelerate(module: Any) -> None:
    """Wraps ``HfDeepSpeedConfig.__init__``, which has the config before DeepSpeed."""
    config_type = module.HfDeepSpeedConfig
    missing = missing_argument(config_type.__init__, ["config_file_or_dict"])
    if missing:
        _leave("accelerate", f"HfDeepSpeedConfig has no argument {missing}")
    elif not is_wrapped(config_type.__init__):
        config_type.__init__ = surround(config_type.__init__, wrapped_calls.around_hf_config)


def hook_transformers(module: Any) -> None:
    """Wraps ``TrainingArguments.__post_init__``, which makes the process group."""
    arguments_type = module.TrainingArguments
    fields = getattr(arguments_type, "__dataclass_fields__", {})
    missing = [name for name in ("deepspeed", "ddp_timeout") if name not in fields]
    if missing:
        _leave("transformers", f"TrainingArguments has no field {missing[0]}")
    elif not is_wrapped(arguments_type.__post_init__):
        arguments_type.__post_init__ = surround(
            arguments_type.__post_init__, wrapped_calls.around_training_arguments
        )


def _leave(module: str, reason: str) -> None:
    logger.warning(
        'smddp: "%s" in a DeepSpeed config will not be read by way of %s, as %s; '
        'use deepspeed.init_distributed(dist_backend="%s")',
        comm_backend.KEY,
        module,
        reason,
        comm_backend.NAME,
    )
