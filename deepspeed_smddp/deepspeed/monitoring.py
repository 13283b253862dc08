"""Follows the steps of the training: for traces, and for DeepSpeed's monitor.

Steps are those of DeepSpeed's engine, or else of torch's optimizers. An engine calls a torch
optimizer several times per step; so once an engine has ended a step, calls of optimizers no longer
count.

The monitor (TensorBoard, CSV, wandb, Comet) gets the counters of the collectives. An engine whose
config enables a monitor writes them on rank 0 at every ``steps_per_print``-th step, over the number
of samples, as DeepSpeed does with its own events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import warn_once
from deepspeed_smddp.upstream import source, wrapping

FEATURE = "monitor"

_EVERY = 10  # steps, if the config has no steps_per_print
_KEYS = ("calls", "bytes", "seconds", "wait_seconds")
_KEPT = 1000  # ends of steps

_ends: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # number, time.monotonic()
_has_engine = False


def follow_engine(engine: Any) -> None:
    """Wraps the engine's step, if it is one that this package knows."""
    if getattr(getattr(engine, "monitor", None), "enabled", False):
        _is_due_here()  # says why the monitor gets no counters
    if source.refusal(FEATURE) is None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        wrapping.wrap(DeepSpeedEngine, "step", _step)


@cache
def follow_optimizers() -> None:
    """A default group is made: steps of torch's optimizers count from now on."""
    register_optimizer_step_post_hook(_after_optimizer)


def step_ends() -> list[dict[str, Any]]:
    """The last steps, as ``number`` and ``ended`` in unix seconds."""
    ahead = time.time() - time.monotonic()
    return [{"number": number, "ended": ended + ahead} for number, ended in list(_ends)]


def events(rows: list[Any], samples: int) -> list[tuple[str, float, int]]:
    """One event per counter, named ``smddp/<collective>/<path>/<counter>``; totals, not rates."""
    return [
        (f"smddp/{row['collective']}/{row['path']}/{key}", row[key], samples)
        for row in rows
        for key in _KEYS
    ]


def _after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _has_engine:
        _ends.append((_ends[-1][0] + 1 if _ends else 1, time.monotonic()))


def _after_engine(number: int) -> None:
    global _has_engine
    if not _has_engine:
        _has_engine = True
        _ends.clear()
    _ends.append((number, time.monotonic()))


def _step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    before = getattr(engine, "global_steps", 0)
    result = original(engine, *args, **kwargs)
    if getattr(engine, "global_steps", 0) == before:
        return result  # gradients accumulate
    _after_engine(engine.global_steps)
    monitor = getattr(engine, "monitor", None)
    due = getattr(monitor, "enabled", False) and _is_due_here()
    if due and engine.global_steps % (engine.steps_per_print() or _EVERY) == 0:
        _write(monitor, engine.global_samples)
    return result


def _is_due_here() -> bool:
    return (
        backend.default_rank() == 0
        and comm_backend.serves_default_group()  # not one of before
        and settings.apply().section.ledger.monitor
        and source.known(FEATURE)
    )


def _write(monitor: Any, samples: int) -> None:
    try:
        monitor.write_events(events(list(backend.statistics()), samples))
    except Exception as error:  # training goes on
        warn_once("monitor", f"smddp: DeepSpeed's monitor did not take the counters: {error}")
