"""Which process groups smddp serves itself, and whether its coalesced operations work in them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_smddp.upstream import source
from deepspeed_smddp.zero import comms_log

_CPU = torch.device("cpu")
_served: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def resolve(group: Any) -> Any:
    """The group itself, or that of all ranks for None, which is DeepSpeed's name for it."""
    return dist.group.WORLD if group is None else group


def serves(group: Any, feature: str) -> bool:
    """Whether ``feature`` may use smddp's coalesced operations on CPU tensors of ``group``.

    False while DeepSpeed logs operations in a way that this package does not know: the log then has
    DeepSpeed's own. The first call for a group of several ranks is collective: the ranks gather and
    reduce a few numbers in both ways, coalesced and one by one, and agree on whether the results
    are the same.
    """
    if comms_log.is_on() and not source.known(comms_log.FEATURE):
        return False
    group = resolve(group)
    served = _served.get(group)
    if served is None:
        served = is_ours(group) and group.size() > 1
        if served and source.switched_on() and not _works(group):
            for name in ("gather", "reduce", "overlap"):
                source.step_back(name, "coalesced operations failed a check")
            served = False
        _served[group] = served
    return served and source.known(feature)


def is_ours(group: Any) -> bool:
    """Whether smddp serves the CPU tensors of a group."""
    if not isinstance(group, dist.ProcessGroup):
        return False
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:  # the group has none for the CPU
        return False
    return backend.name() == "smddp"


def _works(group: dist.ProcessGroup) -> bool:
    ranks, rank = group.size(), group.rank()
    types = (torch.float32, torch.bfloat16)
    shards = [torch.arange(3 + i, dtype=t) + 10 * rank for i, t in enumerate(types)]
    gathered = [torch.empty(shard.numel() * ranks, dtype=shard.dtype) for shard in shards]
    group.allgather_into_tensor_coalesced(gathered, shards).wait()
    apart = [torch.empty_like(whole) for whole in gathered]
    for whole, shard in zip(apart, shards, strict=True):
        group._allgather_base(whole, shard).wait()
    terms = [torch.arange(n * ranks, dtype=torch.bfloat16) + rank for n in (3, 1)]
    sums = [torch.empty(term.numel() // ranks, dtype=term.dtype) for term in terms]
    group.reduce_scatter_tensor_coalesced(sums, terms).wait()
    options = dist.ReduceScatterOptions()
    for total, term in zip(sums, terms, strict=True):
        alone = torch.empty_like(total)
        group._reduce_scatter_base(alone, term, options).wait()
        apart.append(alone)
    same = all(torch.equal(a, b) for a, b in zip([*gathered, *sums], apart, strict=True))
    verdict = torch.tensor([same], dtype=torch.int32)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())
