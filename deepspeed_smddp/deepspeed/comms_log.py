"""DeepSpeed's log of operations, ``comms_logger``, sees those that this package starts itself.

DeepSpeed logs the calls of ``deepspeed.comm``. The gathers and reductions of this package call the
process group instead, and enter themselves here, under the names and with the message sizes that
DeepSpeed's own calls have. An entry's latency is the time from the start of the operation until it
was seen to be complete: DeepSpeed's own entries of operations in flight end at the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

FEATURE = "comms log"

Operation = Literal["all_gather_into_tensor", "reduce_scatter_tensor"]
_LEAST_MS = 1e-3  # DeepSpeed divides by the latency


class Logged:
    """An operation in flight that is entered into the log once it is complete."""

    def __init__(self, work: Any, enter: Callable[[], None]) -> None:
        self._work = work
        self._enter: Callable[[], None] | None = enter

    def wait(self) -> None:
        """Waits for the operation, or raises its error."""
        self._work.wait()
        self._complete()

    def is_completed(self) -> bool:
        """Whether the operation is complete."""
        if not self._work.is_completed():
            return False
        self._complete()
        return True

    def _complete(self) -> None:
        enter, self._enter = self._enter, None
        if enter is not None:
            enter()


def is_on() -> bool:
    """Whether DeepSpeed logs operations."""
    from deepspeed.comm import comm

    return bool(comm.comms_logger.enabled)


def start(operation: Operation, inputs: Iterable[torch.Tensor], begin: Callable[[], Any]) -> Any:
    """Starts an operation by ``begin()`` and returns what it returns, logged if DeepSpeed logs.

    Args:
        operation: DeepSpeed's name for it.
        inputs: this rank's inputs; their bytes are the message size, as for DeepSpeed's own calls.
        begin: returns the operation in flight.
    """
    from deepspeed.comm import comm

    log = comm.comms_logger
    if not log.enabled or not (log.prof_all or operation in log.prof_ops):
        return begin()
    size = sum(tensor.nbytes for tensor in inputs)
    name = f"{operation} | [Caller Func: smddp]" if log.debug else operation
    began = time.perf_counter()

    def enter() -> None:
        milliseconds = max((time.perf_counter() - began) * 1000, _LEAST_MS)
        log.append(operation, name, milliseconds, size)

    return Logged(begin(), enter)
