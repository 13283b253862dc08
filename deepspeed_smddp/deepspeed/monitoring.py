"""Follows the steps of DeepSpeed's engines, for traces and for DeepSpeed's monitor.

The monitor (TensorBoard, CSV, wandb, Comet) gets the counters of the collectives.

An engine whose config enables a monitor writes them on rank 0 at every ``steps_per_print``-th step,
over the number of samples, as DeepSpeed does with its own events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import comm_backend, step_times
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.upstream import source, wrapping
from deepspeed_smddp.upstream.wrapping import Call

FEATURE = "monitor"

_EVERY = 10  # steps, if the config has no steps_per_print
_KEYS = ("calls", "bytes", "seconds", "wait_seconds")

Event = tuple[str, float, int]


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Wraps the engine's step, if it is one that this package knows."""
    yield
    if getattr(getattr(call.result[0], "monitor", None), "enabled", False):
        _is_due_here()  # says why the monitor gets no counters
    if comm_backend.serves_default_group() and source.refusal(FEATURE) is None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        if not wrapping.is_wrapped(DeepSpeedEngine.step):
            wrapping.wrap(DeepSpeedEngine, "step", _step)


def events(rows: list[Any], samples: int) -> list[Event]:
    """One event per counter, named ``smddp/<collective>/<path>/<counter>``; totals, not rates."""
    return [
        (f"smddp/{row['collective']}/{row['path']}/{key}", row[key], samples)
        for row in rows
        for key in _KEYS
    ]


def _step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    before = getattr(engine, "global_steps", 0)
    result = original(engine, *args, **kwargs)
    if getattr(engine, "global_steps", 0) == before:
        return result  # gradients accumulate
    step_times.note(engine.global_steps)
    monitor = getattr(engine, "monitor", None)
    if not getattr(monitor, "enabled", False) or not _is_due_here():
        return result
    if engine.global_steps % (engine.steps_per_print() or _EVERY) == 0:
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
        settings.warn_once(
            "monitor", f"smddp: DeepSpeed's monitor did not take the counters: {error}"
        )
