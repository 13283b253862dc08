"""``torch.distributed.split_group`` for groups of smddp, and with it every ``DeviceMesh``.

If the default group is bound to a GPU (``init_process_group(device_id=...)``, which DeepSpeed
passes on CUDA), a device mesh makes its groups by ``split_group``. That function refuses a backend
that can't split. A backend that says it can gets more than splits: torch hands it to NCCL, as the
communicator to split from, for every ``new_group(backend="nccl")``, which then raises; and the
parts rendezvous under names that count the groups a rank is in, which differ between ranks of
unequal parts.

So smddp does not say it, and its parts are made by ``new_group``: a group of smddp takes nothing
from a parent. Ranks that are in no part take part in naming only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import warn_once
from deepspeed_smddp.upstream import source
from deepspeed_smddp.upstream.wrapping import is_wrapped, missing_argument, wrap

FEATURE = "split_group"
_READ = ("parent_pg", "split_ranks", "timeout", "pg_options", "group_desc")


def install() -> None:
    """Wraps ``split_group`` where torch keeps it; one with other arguments stays as it is."""
    from torch.distributed import device_mesh, distributed_c10d

    original = getattr(distributed_c10d, "split_group", None)
    if original is None or is_wrapped(original):
        return
    missing = missing_argument(original, _READ)
    reason = source.refusal(FEATURE) or (missing and f"it has no argument {missing}")
    if reason:
        warn_once(
            FEATURE,
            f"smddp: split_group stays torch's, which refuses groups of smddp: {reason}. A "
            "DeviceMesh of several dimensions needs a default group without device_id",
        )
        return
    wrap(distributed_c10d, "split_group", split)
    for module in (dist, device_mesh):
        if getattr(module, "split_group", None) is original:
            setattr(module, "split_group", distributed_c10d.split_group)  # noqa: B010


def split(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
    """``split_group``: one group for each part of the parent's ranks; all its ranks call it.

    Returns:
        The group of this rank's part, with the parent's backend; None if it is in no part.

    Raises:
        ValueError: there are no parts, one is empty, or ranks are not the parent's, each once.
    """
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        return original(*args, **kwargs)  # type: ignore[no-any-return]  # raises, with its own words
    parent: Any = given.get("parent_pg") or dist.group.WORLD
    # Of the backend that torch would split: the accelerator's, or else the CPU's.
    present = torch.accelerator.is_available()
    device: Any = torch.accelerator.current_accelerator() if present else torch.device("cpu")
    if not backend.serves(parent, device):
        return original(*args, **kwargs)  # type: ignore[no-any-return]
    parts = _global_ranks(parent, given.get("split_ranks"))
    whole = parent is dist.group.WORLD
    found = None
    for part in parts:
        # Only the parent's ranks are here. Without the others, a group's name is made of its ranks.
        made = dist.new_group(
            part,
            timeout=given.get("timeout"),
            backend=given.get("backend") or dist.get_backend(parent),
            pg_options=given.get("pg_options"),
            use_local_synchronization=not whole,
            group_desc=given.get("group_desc"),
        )
        if found is None and dist.get_rank() in part:
            found = made
    return found


def _global_ranks(parent: dist.ProcessGroup, parts: Any) -> list[list[int]]:
    if not parts or not all(parts):
        raise ValueError("split_ranks cannot be None or empty, nor can one of its groups")
    ranks = dist.get_process_group_ranks(parent)
    outside = [rank for part in parts for rank in part if not 0 <= rank < len(ranks)]
    if outside:
        raise ValueError(
            f"Rank {outside[0]} is out of range: the group to split has {len(ranks)} ranks"
        )
    return [sorted(ranks[rank] for rank in part) for part in parts]
