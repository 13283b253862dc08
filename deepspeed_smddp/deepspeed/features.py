"""Puts this room's gathers and reductions into ZeRO-3, once there is a group that they could serve.

DeepSpeed's functions stay as they are in a process that makes no group of smddp, or runs no ZeRO-3,
or has a DeepSpeed whose sources are not known (``upstream.source``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import gather, overlap, reduce
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.upstream import source
from deepspeed_smddp.upstream.wrapping import Call

_runs_zero3 = False
_installed = False


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Installs before an engine with ZeRO-3 is built; the default group exists by then."""
    config = ds_config.read(ds_config.of_initialize(call.arguments)) or {}
    if ds_config.at(config, "zero_optimization.stage") == 3:
        _install_for_zero3()
    yield


@contextmanager
def around_zero_init(call: Call) -> Iterator[None]:
    """Installs before ``zero.Init`` converts parameters, if there is a group of smddp."""
    if call.arguments.get("enabled", True):
        _install_for_zero3()
    yield


@contextmanager
def around_init_distributed(call: Call) -> Iterator[None]:
    """Installs after ``zero.Init`` has made the first group."""
    yield
    _install()


def _install_for_zero3() -> None:
    global _runs_zero3
    _runs_zero3 = True
    _install()


def _install() -> None:
    global _installed
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
            settings.warn_once(
                f"install {feature.FEATURE}",
                f"smddp: ZeRO-3 runs without smddp's own way to {feature.FEATURE}, as it could not "
                f"be installed: {error}",
            )
