"""Puts the reading of ``"comm_backend"`` in front of DeepSpeed's own entry points.

DeepSpeed reads its config after it has made the process group, and has no key for the backend.
``smddp_autoload`` calls these functions once ``deepspeed``, ``accelerate.utils.deepspeed`` and
``transformers.training_args`` have been imported. Where a version or a signature is not one that
was looked at, the module is left as it is and one warning says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from deepspeed_smddp.errors import logger
from deepspeed_smddp.offload import ds_config as offload
from deepspeed_smddp.zero import (
    auto,
    comm_backend,
    ds_config,
    gather,
    overlap,
    reduce,
    sharding,
    tensor_parallel,
)

OLDEST_DEEPSPEED = (0, 14)
NEWEST_DEEPSPEED = (0, 19)
_MARK = "_smddp_wraps"

# The latest config that accelerate or transformers built: they hand DeepSpeed a backend of their
# own before DeepSpeed sees it.
_hugging_face = comm_backend.Request()


def hook_deepspeed(deepspeed: Any) -> None:
    """Wraps ``initialize``, ``zero.Init.__init__`` and ``init_distributed``."""
    version = (deepspeed.__version_major__, deepspeed.__version_minor__)
    if not OLDEST_DEEPSPEED <= version <= NEWEST_DEEPSPEED:
        _leave("deepspeed", f"version {deepspeed.__version__} is not one this package knows")
        return
    init_type = deepspeed.zero.Init
    init_distributed = deepspeed.comm.comm.init_distributed
    checks = (
        (deepspeed.initialize, ("args", "config", "config_params", "dist_init_required")),
        (init_type.__init__, ("config_dict_or_path", "config")),
        (init_distributed, ("dist_backend", "timeout", "config", "dist_init_required")),
    )
    for function, names in checks:
        missing = _missing(function, names)
        if missing:
            _leave("deepspeed", f"{function.__qualname__} has no argument {missing}")
            return
    if hasattr(deepspeed.initialize, _MARK):
        return
    sharding.install(deepspeed)
    offload.install(deepspeed)
    tensor_parallel.install(deepspeed)
    deepspeed.initialize = _before(deepspeed.initialize, _at_initialize)
    init_type.__init__ = _before(init_type.__init__, _at_zero_init)
    wrapped = _init_distributed(init_distributed)
    for module in (
        deepspeed,
        deepspeed.comm,
        deepspeed.comm.comm,
        deepspeed.runtime.zero.partition_parameters,
    ):
        if getattr(module, "init_distributed", None) is init_distributed:
            module.init_distributed = wrapped
    for feature in (auto, gather, reduce, overlap):
        feature.install(deepspeed)


def hook_accelerate(module: Any) -> None:
    """Wraps ``HfDeepSpeedConfig.__init__``: remembers the config for ``init_distributed``."""
    config_type = module.HfDeepSpeedConfig
    missing = _missing(config_type.__init__, ("config_file_or_dict",))
    if missing:
        _leave("accelerate", f"HfDeepSpeedConfig has no argument {missing}")
        return
    original = config_type.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        global _hugging_face
        original(self, *args, **kwargs)
        _hugging_face = comm_backend.parse(self)

    setattr(wrapper, _MARK, original)
    config_type.__init__ = wrapper


def hook_transformers(module: Any) -> None:
    """Wraps ``TrainingArguments.__post_init__``, which makes the process group."""
    arguments_type = module.TrainingArguments
    fields = getattr(arguments_type, "__dataclass_fields__", {})
    missing = [name for name in ("deepspeed", "ddp_timeout") if name not in fields]
    if missing:
        _leave("transformers", f"TrainingArguments has no field {missing[0]}")
        return
    if not hasattr(arguments_type.__post_init__, _MARK):
        arguments_type.__post_init__ = _before(arguments_type.__post_init__, _at_training_arguments)


def _at_initialize(arguments: dict[str, Any]) -> None:
    init = {
        name: arguments[name]
        for name in ("distributed_port", "dist_init_required")
        if arguments.get(name) is not None
    }
    config = ds_config.of_initialize(arguments)
    comm_backend.fulfil(
        comm_backend.parse(config),
        make_group=arguments.get("dist_init_required") is not False,
        **init,
    )
    auto.choose(config)


def _at_zero_init(arguments: dict[str, Any]) -> None:
    config = arguments.get("config_dict_or_path")
    config = arguments.get("config") if config is None else config
    comm_backend.fulfil(comm_backend.parse(config))
    auto.choose(config)


def _at_training_arguments(arguments: dict[str, Any]) -> None:
    training = arguments["self"]
    request = comm_backend.parse(training.deepspeed or ds_config.of_accelerate_launch())
    # Not launched: the Trainer makes no group here, deepspeed.initialize does later.
    if request.backend is not None and comm_backend.launched():
        comm_backend.fulfil(request, timeout=timedelta(seconds=training.ddp_timeout))


def _init_distributed(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        import torch.distributed as dist

        request = _request_for(bound.arguments.get("config"))
        if request.backend is not None and not dist.is_initialized():
            given = bound.arguments.get("dist_backend")
            if given in (None, _accelerator_backend()):
                comm_backend.prepare(request)
                bound.arguments["dist_backend"] = request.backend
            elif given != request.backend:
                logger.warning(
                    'smddp: the DeepSpeed config has "%s": "%s", but init_distributed was called '
                    'with "%s", which is used',
                    comm_backend.KEY,
                    request.backend,
                    given,
                )
        original(*bound.args, **bound.kwargs)

    setattr(wrapper, _MARK, original)
    return wrapper


def _request_for(config: Any) -> comm_backend.Request:
    if config is not None:
        return comm_backend.parse(config)
    if _hugging_face.backend is not None:
        return _hugging_face
    return comm_backend.parse(ds_config.of_accelerate_launch() or ds_config.of_command_line())


def _accelerator_backend() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())


def _before(
    original: Callable[..., Any], action: Callable[[dict[str, Any]], None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return original(*args, **kwargs)  # raises, with its own message
        action(arguments)
        return original(*args, **kwargs)

    setattr(wrapper, _MARK, original)
    return wrapper


def _missing(function: Callable[..., Any], names: Iterable[str]) -> str | None:
    parameters = inspect.signature(function).parameters
    return next((name for name in names if name not in parameters), None)


def _leave(module: str, reason: str) -> None:
    logger.warning(
        'smddp: "%s" in a DeepSpeed config will not be read by way of %s, as %s; '
        'use deepspeed.init_distributed(dist_backend="%s")',
        comm_backend.KEY,
        module,
        reason,
        comm_backend.NAME,
    )
