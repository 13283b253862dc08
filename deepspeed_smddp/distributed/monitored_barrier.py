"""``monitored_barrier`` for groups over smddp, which torch has for groups over Gloo alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from deepspeed_smddp.config import settings

# So much later than rank 0 the others give up: its answer names who is missing.
_GRACE_SECONDS = 5.0
_TURN = timedelta(seconds=1)  # of a wait that Ctrl-C ends
_VERDICT = "verdict"
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits until all ranks of the group have called it, and names those that have not.

    It is torch's function of this name. The ranks meet in the group's store and not in a
    collective: after a failure the group can be used as before.

    Args:
        group: all ranks of the job if it is None.
        timeout: a rank that comes later than this after rank 0 is missed; ``timeout_seconds`` if it
            is None.
        wait_all_ranks: name all ranks that have not come and not only the first.

    Raises:
        RuntimeError: on all ranks that have come; names the ranks that have not.
    """
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        return
    seconds = (timeout or settings.resolve().timeout(None)).total_seconds()
    number = _calls.get(group, 0)
    _calls[group] = number + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    now, before = (PrefixStore(f"monitored_barrier/{n}", store) for n in (number, number - 1))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    now.set(str(rank), "")
    if rank == 0:
        others = [str(r) for r in range(1, size)]
        all_came = not others or _await(now, others, seconds)
        missing = [] if all_came else [int(key) for key in others if not now.check([key])]
        now.set(_VERDICT, _sentence(group, missing if wait_all_ranks else missing[:1], seconds))
    elif not _await(now, [_VERDICT], seconds + _GRACE_SECONDS):
        raise RuntimeError(_sentence(group, [0], seconds))
    verdict = now.get(_VERDICT).decode()
    if verdict:
        raise RuntimeError(verdict)
    if number > 0:  # all ranks have left it
        for key in (str(rank), *([_VERDICT] if rank == 0 else [])):
            before.delete_key(key)


def _await(store: Store, keys: list[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        left = timedelta(seconds=max(0.001, end - time.monotonic()))
        try:
            store.wait(keys, min(left, _TURN))
            return True
        except RuntimeError:  # what a store raises differs; most: DistStoreError
            if time.monotonic() >= end:
                return False


def _sentence(group: dist.ProcessGroup, missing: Sequence[int], seconds: float) -> str:
    if not missing:
        return ""
    ranks = ", ".join(f"rank {dist.get_global_rank(group, rank)}" for rank in missing)
    have = "has" if len(missing) == 1 else "have"
    return f"smddp: {ranks} {have} not called monitored_barrier within {seconds:g} s"
