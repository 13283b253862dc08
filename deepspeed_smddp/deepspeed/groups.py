"""Which process groups, and tensors of which devices, the features of ZeRO-3 serve."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.deepspeed import operations
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.upstream import source

_CPU = torch.device("cpu")


def resolve(group: Any) -> Any:
    """The group itself, or that of all ranks for None, which is DeepSpeed's name for it."""
    return dist.group.WORLD if group is None else group


def serves(group: Any, feature: str, device: torch.device = _CPU) -> bool:
    """Whether ``feature`` may use smddp's coalesced operations on tensors of ``device`` in a group.

    False while DeepSpeed logs operations in a way that this package does not know: the log then has
    DeepSpeed's own.
    """
    if operations.are_logged() and not source.known(operations.COMMS_LOG):
        return False
    group = resolve(group)
    return backend.serves(group, device) and group.size() > 1 and source.known(feature)


def computes_on(device: torch.device) -> bool:
    """Whether DeepSpeed computes on ``device``, and it is of a type that smddp carries."""
    from deepspeed.accelerator import get_accelerator

    return device.type in ("cpu", "cuda") and device.type == get_accelerator().device_name()
