"""The collectives that this package starts for ZeRO-3: on what, their labels, DeepSpeed's log.

DeepSpeed logs the calls of ``deepspeed.comm`` (``comms_logger``). The gathers and reductions of
this package call the process group instead, and enter themselves, under the names and with the
message sizes that DeepSpeed's own calls have. An entry's latency is the time from the start of the
operation until it was seen to be complete: DeepSpeed's own entries of operations in flight end at
the start.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import backend
from deepspeed_smddp.distributed.labels import labelled
from deepspeed_smddp.upstream import source

COMMS_LOG = "comms log"

_CPU = torch.device("cpu")
_LEAST_MS = 1e-3  # DeepSpeed divides by the latency
_counts: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()  # by group


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


def resolve(group: Any) -> Any:
    """The group itself, or that of all ranks for None, which is DeepSpeed's name for it."""
    return dist.group.WORLD if group is None else group


def serves(group: Any, feature: str, device: torch.device = _CPU) -> bool:
    """Whether ``feature`` may use smddp's coalesced operations on tensors of ``device`` in a group.

    False while DeepSpeed logs operations in a way that this package does not know: the log then has
    DeepSpeed's own.
    """
    from deepspeed.comm import comm

    if comm.comms_logger.enabled and not source.known(COMMS_LOG):
        return False
    group = resolve(group)
    return backend.serves(group, device) and group.size() > 1 and source.known(feature)


def computes_on(device: torch.device) -> bool:
    """Whether DeepSpeed computes on ``device``, and it is of a type that smddp carries."""
    from deepspeed.accelerator import get_accelerator

    return device.type in ("cpu", "cuda") and device.type == get_accelerator().device_name()


def start(
    operation: Literal["all_gather_into_tensor", "reduce_scatter_tensor"],
    inputs: Sequence[torch.Tensor],
    begin: Callable[[], Any],
    label: str,
    parameters: Sequence[str] = (),
    digest: int = 0,
) -> Any:
    """Starts an operation by ``begin()`` and returns what it returns, logged if DeepSpeed logs.

    The message size is the bytes of this rank's ``inputs``, as for DeepSpeed's own calls. Label,
    parameters and digest are as :func:`described` returns them.
    """
    from deepspeed.comm import comm

    log = comm.comms_logger
    with labelled(label, parameters, digest):
        if not log.enabled or not (log.prof_all or operation in log.prof_ops):
            return begin()
        began = time.perf_counter()
        work = begin()
    size = sum(tensor.nbytes for tensor in inputs)
    name = f"{operation} | [Caller Func: smddp]" if log.debug else operation

    def enter() -> None:
        milliseconds = max((time.perf_counter() - began) * 1000, _LEAST_MS)
        log.append(operation, name, milliseconds, size)

    return Logged(work, enter)


def memory(count: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for so many elements of the type of ``like``, on its device.

    On a GPU it belongs to the current stream, which starts the operation, as DeepSpeed's own does.
    DeepSpeed makes the stream that computes wait for that one, and records the former when it
    releases a parameter.
    """
    return like.new_empty(count)


def number(param: Any, group: Any) -> None:
    """Numbers a parameter that ``group`` divides, among those: the same on all its ranks.

    DeepSpeed's own number counts the parameters of a process, which may have some in other groups.
    """
    param.smddp_number = next(_counts.setdefault(group, itertools.count(1)))


def described(params: Sequence[Any], what: str = "") -> tuple[str, tuple[str, ...], int]:
    """The label of an operation on parameters, their names, and a digest of their numbers.

    The label has the smallest module that holds all of them; ``what`` of the module it moves: ""
    for the parameters, "gradients of ". DeepSpeed's engine knows the names once it is made; before,
    the label has their numbers, and there are no names.
    """
    digest = hash(tuple([getattr(param, "smddp_number", 0) for param in params])) & 0xFFFFFFFF
    known = vars(params[0]).setdefault("smddp_labels", {})  # ends with the parameter
    key = (what, params[-1].ds_id, len(params))
    if key not in known:
        from deepspeed.utils.debug import debug_param2name

        count = f"{len(params)} parameter{'s' if len(params) > 1 else ''}"
        names = [debug_param2name(param) for param in params]
        if "unknown" in names:
            return f"ZeRO-3 {what}parameter {params[0].ds_id} of the model ({count})", (), digest
        parts = [name.split(".")[:-1] for name in names]
        shared = os.path.commonprefix(parts)  # noqa: RUF071 - of lists
        module = ".".join(shared) or "(the model itself)"
        known[key] = f"ZeRO-3 {what}module {module} ({count})", tuple(names)
    return (*known[key], digest)
