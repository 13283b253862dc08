"""How long an operation of a group may take: which request applies, and who made it.

Several layers pass a timeout to torch, with and without a user's wish. The rule:
``timeout_seconds`` if it is set; else the timeout that the call for this group asked for; else, for
a further group, the one of the default group; else the default of ``timeout_seconds``. What torch
fills in if no caller asks does not count. ``backend`` and ``comm_backend`` call this module.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import SECTION
from deepspeed_smddp.config.settings import Settings
from deepspeed_smddp.errors import logger, warn_once

_KEY = "timeout_seconds"
_LOGGER_OF_TORCH = "torch.distributed.c10d_logger"  # wraps the public functions that make groups
# Between torch and the program: libraries, with what they pass on, and what stands between their
# functions.
_LAYERS = {
    "transformers": "ddp_timeout of transformers",
    "accelerate": "InitProcessGroupKwargs of accelerate",
    "deepspeed": "the program, by way of DeepSpeed",
}
_BETWEEN = ("torch", "deepspeed_smddp", "smddp_autoload", "contextlib", "functools")

_of_default_group: timedelta | None = None


@dataclass(frozen=True)
class Asked:
    """The timeout that a call gave to torch; ``by`` names who gave it, None: no caller did."""

    timeout: timedelta
    by: str | None

    @property
    def explicit(self) -> timedelta | None:
        """The timeout, or None if it is what torch fills in."""
        return None if self.by is None else self.timeout


def of_group(current: Settings, given: timedelta, rank: int) -> timedelta:
    """The deadline of the operations of a group that is being made; says it for the default group.

    ``given`` is what torch passes to the backend.
    """
    global _of_default_group
    asked = asked_for(given)
    if dist.is_initialized():
        return current.timeout(asked.explicit or _of_default_group)
    _of_default_group = current.timeout(asked.explicit)
    if rank == 0:
        # WARNING is the lowest level that a program without logging set-up shows.
        warn_once("deadline", sentence(current, asked))
    return _of_default_group


def changed(current: Settings, rank: int) -> timedelta:
    """The deadline of a default group that was made before ``timeout_seconds`` was read."""
    global _of_default_group
    before, _of_default_group = _of_default_group, current.timeout(None)
    if before is not None and before != _of_default_group and rank == 0:
        logger.warning(
            "smddp: from now on operations time out after %s (%s), no longer after %s",
            _show(_of_default_group),
            _source(current),
            _show(before),
        )
    return _of_default_group


def asked_for(given: timedelta) -> Asked:
    """Finds out from the callers who asked torch for a timeout."""
    frames = list(_frames())
    if not _was_passed(frames, given):
        return Asked(given, None)
    layers = set(map(_top, frames))
    of_deepspeed = getattr(sys.modules.get("deepspeed.constants"), "default_pg_timeout", None)
    if "deepspeed" in layers and given == of_deepspeed:
        variable = "DEEPSPEED_TIMEOUT"
        return Asked(given, variable if os.environ.get(variable) else "DeepSpeed's default")
    by = next((by for layer, by in _LAYERS.items() if layer in layers), None)
    return Asked(given, by or (_program(frames[-1]) if frames else "the program"))


def sentence(current: Settings, asked: Asked) -> str:
    """What applies to the default group, whose it is, and what was asked for in vain."""
    set_here = current.source(_KEY) != settings.DEFAULT
    applies = current.timeout(asked.explicit)
    by = _source(current) if set_here or asked.by is None else f"asked for by {asked.by}"
    text = f"smddp: operations time out after {_show(applies)} ({by})"
    if asked.timeout == applies:
        return text
    if asked.by is None:
        return f"{text}; torch's own default of {_show(asked.timeout)} does not apply"
    return f"{text}; torch was asked for {_show(asked.timeout)} (by {asked.by})"


def _source(current: Settings) -> str:
    source = current.source(_KEY)
    if source == settings.DEFAULT:
        return f"the default of {_KEY}"
    if source == settings.DS_CONFIG:
        return f'{_KEY} of the section "{SECTION}" of the DeepSpeed config'
    return f"{_KEY} by {source}" if source.endswith(")") else source


def _show(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"


def _frames() -> Iterator[FrameType]:
    """The callers from here outwards, up to the first one that is no library in between."""
    frame: FrameType | None = sys._getframe(2)  # a list of them in its own frame would be a cycle
    while frame is not None:
        yield frame
        if _top(frame) not in (*_LAYERS, *_BETWEEN):
            return
        frame = frame.f_back


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _was_passed(frames: list[FrameType], given: timedelta) -> bool:
    """Whether a call to torch had a timeout; by its value if no such call can be seen."""
    seen = False
    for frame in frames:
        held = frame.f_locals
        if frame.f_globals.get("__name__") != _LOGGER_OF_TORCH or "func" not in held:
            continue
        seen = True
        try:
            call = inspect.signature(held["func"]).bind_partial(*held["args"], **held["kwargs"])
        except (KeyError, TypeError, ValueError):
            return given != dist.constants.default_pg_timeout
        if call.arguments.get("timeout") is not None:
            return True
    return not seen and given != dist.constants.default_pg_timeout


def _program(frame: FrameType) -> str:
    """The name of the installed package that a frame belongs to, or "the program"."""
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    file = os.path.abspath(frame.f_code.co_filename)
    return _top(frame) if any(file.startswith(p + os.sep) for p in installed) else "the program"
