"""The default group gets the backend that the DeepSpeed config names, whichever library makes it.

DeepSpeed reads its config after it has made the process group, and has no key for the backend.
Each function here is a context manager around a function of DeepSpeed, accelerate or transformers
that makes the group or has the config first. ``hooks`` and ``pipeline`` put them there.
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
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.errors import logger
from deepspeed_smddp.upstream import seams, shared_memory_op
from deepspeed_smddp.upstream.wrapping import Call

# The latest config that accelerate or transformers built, while they keep it, and what it asks for.
# They call init_distributed with a backend of their own before DeepSpeed sees the config.
_hugging_face: tuple[Callable[[], Any], comm_backend.Request] | None = None


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Makes the group before ``deepspeed.initialize`` does."""
    init = {
        name: call.arguments[name]
        for name in ("distributed_port", "dist_init_required")
        if call.arguments.get(name) is not None
    }
    comm_backend.fulfil(
        comm_backend.parse(ds_config.of_initialize(call.arguments)),
        make_group=call.arguments.get("dist_init_required") is not False,
        **init,
    )
    yield


@contextmanager
def around_zero_init(call: Call) -> Iterator[None]:
    """Makes the group before ``zero.Init`` does."""
    comm_backend.fulfil(comm_backend.parse(ds_config.of_zero_init(call.arguments)))
    yield


@contextmanager
def around_init_distributed(call: Call) -> Iterator[None]:
    """Replaces the backend that ``init_distributed`` is called with, unless the caller chose it."""
    request = _request_for(call.arguments.get("config"))
    if request.backend is not None and not dist.is_initialized():
        given = call.arguments.get("dist_backend")
        if given is None and _deepspeed_reads(call.arguments.get("config")) == request.backend:
            comm_backend.prepare(request)
        elif given in (None, _accelerator_backend()):
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
    if _makes_or_has_smddp(call):
        shared_memory_op.leave_out_if_not_compilable()
        if not dist.is_initialized() and call.arguments.get("auto_mpi_discovery", True):
            comm_backend.take_place()
    yield


def _makes_or_has_smddp(call: Call) -> bool:
    if dist.is_initialized():
        return comm_backend.serves_default_group()
    given = call.arguments.get("dist_backend")
    return comm_backend.NAME in str(given or _deepspeed_reads(call.arguments.get("config")))


@contextmanager
def around_training_arguments(call: Call) -> Iterator[None]:
    """Makes the group before transformers' ``TrainingArguments.__post_init__`` does."""
    training = call.arguments["self"]
    request = comm_backend.parse(training.deepspeed or ds_config.of_accelerate_launch())
    # Without a launcher the Trainer makes no group here; deepspeed.initialize makes it later.
    if request.wants_smddp:
        comm_backend.take_place()
    if request.backend is not None and comm_backend.launched():
        comm_backend.fulfil(request, timeout=timedelta(seconds=training.ddp_timeout))
    yield


@contextmanager
def around_hf_config(call: Call) -> Iterator[None]:
    """Remembers the config of accelerate's ``HfDeepSpeedConfig`` for ``init_distributed``."""
    global _hugging_face
    yield
    config = call.arguments["self"]
    _hugging_face = weakref.ref(config), comm_backend.parse(config)


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


def _deepspeed_reads(config: Any) -> Any:
    """The backend that DeepSpeed itself takes from the config; None if it does not look there."""
    backend_of_config = seams.find("comm_backend")
    return None if config is None or backend_of_config is None else backend_of_config(config)


def _say_overridden(given: str | None, request: comm_backend.Request) -> None:
    # transformers and accelerate give the accelerator's backend without having been asked to.
    unasked = request is _hugging_faces() or ds_config.of_accelerate_launch() is not None
    if given is not None and given != request.backend and not unasked:
        settings.warn_once(
            "overridden backend",
            f'smddp: init_distributed was called with "{given}", the accelerator\'s own; '
            f'"{comm_backend.KEY}": "{request.backend}" of the DeepSpeed config applies',
        )


def _accelerator_backend() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().communication_backend_name())
