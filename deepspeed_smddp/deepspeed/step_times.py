"""When steps of the training ended, for traces: those of DeepSpeed's engine, or torch's optimizers.

An engine calls a torch optimizer several times per step; so once an engine has noted a step, calls
of optimizers no longer count.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_KEPT = 1000

_ends: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # number, time.monotonic()
_has_engine = False
_is_hooked = False


def note(number: int) -> None:
    """An engine has ended its step ``number``."""
    global _has_engine
    if not _has_engine:
        _has_engine = True
        _ends.clear()
    _ends.append((number, time.monotonic()))


def follow(store: Any, rank: int, ranks: int) -> None:
    """A default group is made: steps of torch's optimizers count from now on."""
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        register_optimizer_step_post_hook(_after_optimizer)


def ends() -> list[dict[str, Any]]:
    """The last steps, as ``number`` and ``ended`` in unix seconds."""
    ahead = time.time() - time.monotonic()
    return [{"number": number, "ended": ended + ahead} for number, ended in list(_ends)]


def _after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _has_engine:
        _ends.append((_ends[-1][0] + 1 if _ends else 1, time.monotonic()))
