"""Which process groups smddp serves itself, and whether its coalesced operations work in them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_smddp.deepspeed import comms_log
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.upstream import source

_CPU = torch.device("cpu")
# By group and type of device.
_served: WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = WeakKeyDictionary()


def resolve(group: Any) -> Any:
    """The group itself, or that of all ranks for None, which is DeepSpeed's name for it."""
    return dist.group.WORLD if group is None else group


def serves(group: Any, feature: str, device: torch.device = _CPU) -> bool:
    """Whether ``feature`` may use smddp's coalesced operations on tensors of ``device`` in a group.

    False while DeepSpeed logs operations in a way that this package does not know: the log then has
    DeepSpeed's own. The first call for a group of several ranks and a type of device is collective:
    the ranks gather and reduce a few numbers in both ways, coalesced and one by one, and agree on
    whether the results are the same.
    """
    if comms_log.is_on() and not source.known(comms_log.FEATURE):
        return False
    group = resolve(group)
    known = _served.setdefault(group, {}) if isinstance(group, dist.ProcessGroup) else {}
    served = known.get(device.type)
    if served is None:
        served = backend.serves(group, device) and group.size() > 1
        if served and source.switched_on() and not _works(group, device):
            for name in ("gather", "reduce", "overlap"):
                source.step_back(name, "coalesced operations failed a check")
            served = False
        known[device.type] = served
    return served and source.known(feature)


def computes_on(device: torch.device) -> bool:
    """Whether DeepSpeed computes on ``device``, and it is of a type that smddp carries."""
    from deepspeed.accelerator import get_accelerator

    return device.type in ("cpu", "cuda") and device.type == get_accelerator().device_name()


def _works(group: dist.ProcessGroup, device: torch.device) -> bool:
    ranks, rank = group.size(), group.rank()
    types = (torch.float32, torch.bfloat16)
    shards = [torch.arange(3 + i, dtype=t, device=device) + 10 * rank for i, t in enumerate(types)]
    gathered = [shard.new_empty(shard.numel() * ranks) for shard in shards]
    group.allgather_into_tensor_coalesced(gathered, shards).wait()
    apart = [torch.empty_like(whole) for whole in gathered]
    for whole, shard in zip(apart, shards, strict=True):
        group._allgather_base(whole, shard).wait()
    terms = [torch.arange(n * ranks, dtype=types[1], device=device) + rank for n in (3, 1)]
    sums = [term.new_empty(term.numel() // ranks) for term in terms]
    group.reduce_scatter_tensor_coalesced(sums, terms).wait()
    options = dist.ReduceScatterOptions()
    for total, term in zip(sums, terms, strict=True):
        alone = torch.empty_like(total)
        group._reduce_scatter_base(alone, term, options).wait()
        apart.append(alone)
    same = all(torch.equal(a, b) for a, b in zip([*gathered, *sums], apart, strict=True))
    verdict = torch.tensor([same], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())
