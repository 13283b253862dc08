"""What this package puts around functions of DeepSpeed, accelerate and transformers.

DeepSpeed reads its config after it has made the process group, and has no key for the backend. So
each context manager here surrounds a function that makes the group or has the config first. In a
process that has not chosen smddp they read the config and pass all arguments on as they are.

``smddp_autoload`` calls the functions ``hook_*`` once ``deepspeed``, ``accelerate.utils.deepspeed``
and ``transformers.training_args`` have been imported. If a version is not supported or a signature
is not the expected one, a config that chooses smddp is refused, and nothing else is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import (
    auto,
    autotp,
    comm_backend,
    gather,
    monitoring,
    overlap,
    reduce,
    start_up,
    unsupported_features,
)
from deepspeed_smddp.deepspeed.sharding import sharding_degree
from deepspeed_smddp.distributed import backend, launchers
from deepspeed_smddp.errors import SmddpConfigError, logger, warn_once
from deepspeed_smddp.models.offload import offload_activations
from deepspeed_smddp.upstream import compile_locks, shared_memory_op, source
from deepspeed_smddp.upstream.wrapping import Around, Call, missing_argument, surround

# The latest config that accelerate or transformers built, while they keep it, and what it asks for.
# They call init_distributed with a backend of their own before DeepSpeed sees the config.
_hugging_face: tuple[Callable[[], Any], comm_backend.Request] | None = None

_runs_zero3 = False
_installed = False


def hook_deepspeed(deepspeed: Any) -> None:
    """Wraps ``initialize``, ``zero.Init.__init__`` and ``init_distributed``.

    In a version that is not supported, ``initialize`` refuses a config that chooses smddp.
    """
    reason = source.refusal("comm_backend") or _changed(deepspeed)
    if reason is not None:
        deepspeed.initialize = surround(deepspeed.initialize, _refusing(reason))
        return
    init_type = deepspeed.zero.Init
    init_distributed = deepspeed.comm.comm.init_distributed
    # importlib.reload(deepspeed) replaces some of them.
    deepspeed.initialize = surround(deepspeed.initialize, around_initialize)
    init_type.__init__ = surround(init_type.__init__, around_zero_init)
    wrapped = surround(init_distributed, around_init_distributed)
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
    else:
        config_type.__init__ = surround(config_type.__init__, around_hf_config)


def hook_transformers(module: Any) -> None:
    """Wraps ``TrainingArguments.__post_init__``, which makes the process group."""
    kind = module.TrainingArguments
    fields = getattr(kind, "__dataclass_fields__", {})
    missing = [name for name in ("deepspeed", "ddp_timeout") if name not in fields]
    if missing:
        _leave("transformers", f"TrainingArguments has no field {missing[0]}")
    else:
        kind.__post_init__ = surround(kind.__post_init__, around_training_arguments)


def _changed(deepspeed: Any) -> str | None:
    checks = (
        (deepspeed.initialize, ("args", "config", "config_params", "dist_init_required")),
        (deepspeed.zero.Init.__init__, ("config_dict_or_path", "config")),
        (
            deepspeed.comm.comm.init_distributed,
            ("dist_backend", "timeout", "config", "dist_init_required"),
        ),
    )
    for function, names in checks:
        missing = missing_argument(function, names)
        if missing:
            return f"{function.__qualname__} has no argument {missing}"
    return None


def _refusing(reason: str) -> Around:
    @contextmanager
    def refusing(call: Call) -> Iterator[None]:
        request = comm_backend.parse(ds_config.of_initialize(call.arguments))
        if request.wants_smddp and not comm_backend.serves_default_group():
            raise SmddpConfigError(
                f'"{comm_backend.KEY}": "{comm_backend.NAME}" in a DeepSpeed config does not go '
                f"with this DeepSpeed: {reason}; call deepspeed.init_distributed(dist_backend="
                f'"{comm_backend.NAME}") before'
            )
        yield

    return refusing


def _leave(module: str, reason: str) -> None:
    # Who has not chosen smddp is told nothing; who has gets the error of initialize, as accelerate
    # or transformers makes the group with another backend.
    logger.debug("smddp: the DeepSpeed config is not read by way of %s: %s", module, reason)


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Around ``deepspeed.initialize``.

    Raises:
        SmddpConfigError: the config, an argument or the version of DeepSpeed does not go with what
            the "smddp" section asks for.
    """
    given = call.arguments
    request = comm_backend.parse(ds_config.of_initialize(given))
    names = ("distributed_port", "dist_init_required")
    passed = {name: given[name] for name in names if given.get(name) is not None}
    make_group = given.get("dist_init_required") is not False
    comm_backend.initialise(request, make_group=make_group, **passed)
    config = request.config
    _install(for_zero3=ds_config.at(config, "zero_optimization.stage") == 3)
    if not comm_backend.serves_default_group():
        yield
        return
    for sentence in unsupported_features.sentences(config):
        warn_once(sentence, sentence)
    auto.choose(config)
    with autotp.divided(call, config):
        with sharding_degree.sharded(call, config), start_up.watched():
            yield
        engine = call.result[0]
        monitoring.follow_engine(engine)
        _offload_activations(engine.module)


@contextmanager
def around_zero_init(call: Call) -> Iterator[None]:
    """Around ``zero.Init.__init__``."""
    config = call.arguments.get("config_dict_or_path")
    request = comm_backend.parse(call.arguments.get("config") if config is None else config)
    comm_backend.initialise(request)
    enabled = call.arguments.get("enabled", True)
    _install(for_zero3=bool(enabled))
    auto.choose(request.config)
    if enabled:
        sharding_degree.choose_group(call)
    yield


@contextmanager
def around_init_distributed(call: Call) -> Iterator[None]:
    """Replaces the backend that ``init_distributed`` is called with, unless the caller chose it."""
    if dist.is_initialized():
        is_ours = comm_backend.serves_default_group()
    else:
        _choose_backend(call)
        is_ours = comm_backend.NAME in str(call.arguments.get("dist_backend"))
        if is_ours and call.arguments.get("auto_mpi_discovery", True):
            comm_backend.set_launcher_variables()
    if is_ours:
        shared_memory_op.leave_out_if_not_compilable()
        compile_locks.install()
        with start_up.watched():
            yield
    else:
        yield
    _install()  # the first group that zero.Init makes


def _choose_backend(call: Call) -> None:
    request = _request_for(call.arguments.get("config"))
    given = call.arguments.get("dist_backend")
    if request.backend is not None:
        if given in (None, _accelerator_backend()):
            _say_overridden(given, request)
            comm_backend.prepare(request)
            call.change(dist_backend=request.backend)
        elif given != request.backend:
            logger.warning(
                'smddp: the DeepSpeed config has "%s": "%s", but init_distributed was called '
                'with "%s", which is used',
                comm_backend.KEY,
                request.backend,
                given,
            )


@contextmanager
def around_training_arguments(call: Call) -> Iterator[None]:
    """Makes the group before transformers' ``TrainingArguments.__post_init__`` does."""
    training = call.arguments["self"]
    request = comm_backend.parse(training.deepspeed or ds_config.of_accelerate_launch())
    # Without a launcher the Trainer makes no group here; deepspeed.initialize makes it later.
    if request.wants_smddp:
        comm_backend.set_launcher_variables()
    if request.backend is not None and launchers.has_all_variables():
        comm_backend.initialise(request, timeout=timedelta(seconds=training.ddp_timeout))
    yield


@contextmanager
def around_hf_config(call: Call) -> Iterator[None]:
    """Remembers the config of accelerate's ``HfDeepSpeedConfig`` for ``init_distributed``."""
    global _hugging_face
    yield
    config = call.arguments["self"]
    _hugging_face = weakref.ref(config), comm_backend.parse(config)


def _install(for_zero3: bool = False) -> None:
    """Puts this package's gathers and reductions into ZeRO-3, once it runs and there is a group.

    A group of smddp; and DeepSpeed's sources have to be known (``upstream.source``).
    """
    global _installed, _runs_zero3
    _runs_zero3 = _runs_zero3 or for_zero3
    if _installed or not _runs_zero3 or not backend.has_made_group():
        return
    _installed = True
    import deepspeed

    for feature in (gather, reduce, overlap):
        if not source.known(feature.FEATURE):
            continue
        try:
            feature.install(deepspeed)
        except Exception as error:
            warn_once(
                f"install {feature.FEATURE}",
                f"smddp: ZeRO-3 runs without smddp's own way to {feature.FEATURE}, as it could not "
                f"be installed: {error}",
            )


def _offload_activations(module: Any) -> None:
    asked = settings.current().section.activation_offload
    if asked.enabled:
        try:
            offload_activations(module, asked.horizon, directory=asked.directory or None)
        except (ValueError, NotADirectoryError) as error:
            raise SmddpConfigError(
                f'"smddp.activation_offload" can\'t be applied: {error}'
            ) from None


def _hugging_faces() -> comm_backend.Request | None:
    if _hugging_face is None or _hugging_face[0]() is None:
        return None
    return _hugging_face[1]


def _request_for(config: Any) -> comm_backend.Request:
    if config is not None:
        return comm_backend.parse(config)
    held = _hugging_faces()
    if held is not None and held.backend is not None:
        return held
    return comm_backend.parse(ds_config.of_accelerate_launch() or ds_config.of_command_line())


def _say_overridden(given: str | None, request: comm_backend.Request) -> None:
    # transformers and accelerate give the accelerator's backend without having been asked to.
    unasked = request is _hugging_faces() or ds_config.of_accelerate_launch() is not None
    if given is not None and given != request.backend and not unasked:
        warn_once(
            "overridden backend",
            f'smddp: init_distributed was called with "{given}", the accelerator\'s own; '
            f'"{comm_backend.KEY}": "{request.backend}" of the DeepSpeed config applies',
        )


def _accelerator_backend() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())
