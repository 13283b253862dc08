"""A default group as torch binds it to a GPU: DeviceMesh then makes its groups by split_group.

With ``init_process_group(device_id=...)``, which DeepSpeed passes on CUDA, torch splits new groups
off the default group. Here the accelerator is a CUDA device that does not exist; tensors are on
the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def bound(rank: int) -> Iterator[None]:
    """The default group is bound to GPU ``rank`` while the context lasts."""
    world = dist.group.WORLD
    assert world is not None
    before = world.bound_device_id
    cuda = mock.Mock(return_value=torch.device("cuda", rank))
    world.bound_device_id = torch.device("cuda", rank)
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", cuda),
    ):
        yield
    world.bound_device_id = before
