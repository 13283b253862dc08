"""``smdistributed.modelparallel.torch``: initialisation, ranks and groups.

There is no pipeline and no tensor parallelism here, so that every rank is a data-parallel rank, and
the groups of all other kinds have one member.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.compat import parameters
from deepspeed_smddp.compat.parameters import ModelParallelParameters

_BACKENDS = {"auto": "smddp"}  # of "ddp_dist_backend"


class CommGroup(enum.Enum):
    """The ranks that take part in a collective of the library's interface."""

    WORLD = "all ranks"
    DP_GROUP = "the data-parallel ranks"
    RDP_GROUP = "the ranks that hold the same part of a model"
    MP_GROUP = "the ranks that share a model"
    PP_GROUP = "the stages of a pipeline"
    TP_GROUP = "the ranks that share a layer"


_ALL_RANKS = (CommGroup.WORLD, CommGroup.DP_GROUP, CommGroup.RDP_GROUP)

# `cfg` holds the parameters that apply, `model` the job's one DistributedModel.
state = SimpleNamespace(
    cfg=ModelParallelParameters(),
    initialized=False,
    model=None,
    module_manager=SimpleNamespace(translate_functions=[]),
)


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the parameters, and makes the default process group if there is none.

    Args:
        config: parameters; those in ``SM_HP_MP_PARAMETERS`` have precedence.

    Raises:
        SmddpConfigError: an unknown parameter or a wrong value.
        Unsupported: pipeline or tensor parallelism, delayed initialisation.
    """
    state.cfg = parameters.read(ModelParallelParameters, config)
    if not dist.is_initialized():
        import deepspeed

        backend = state.cfg.ddp_dist_backend
        deepspeed.init_distributed(dist_backend=_BACKENDS.get(backend, backend), verbose=False)
    state.initialized = True


def is_initialized() -> bool:
    """Whether :func:`init` was called."""
    return bool(state.initialized)


def rank() -> int:
    """This process's rank in the job."""
    return dist.get_rank()


def size() -> int:
    """The number of ranks of the job."""
    return dist.get_world_size()


def local_rank() -> int:
    """This process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """The number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size())


dp_rank = rdp_rank = rank
dp_size = rdp_size = size


def _only_rank() -> int:
    """The rank in a group of one member: 0."""
    return 0


def _one() -> int:
    """The size of a group of one member."""
    return 1


pp_rank = tp_rank = mp_rank = _only_rank
pp_size = tp_size = mp_size = _one


def get_dp_process_group() -> Any:
    """The torch.distributed group of the data-parallel ranks, which are all ranks."""
    return dist.group.WORLD


get_world_process_group = get_rdp_process_group = get_dp_process_group


def get_dp_group() -> list[int]:
    """Ranks of the data-parallel group."""
    return list(range(size()))


get_rdp_group = get_dp_group


def get_tp_group() -> list[int]:
    """Ranks of the tensor-parallel group: only this rank."""
    return [rank()]


get_pp_group = get_mp_group = get_tp_group


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for the group's ranks."""
    if group in _ALL_RANKS:
        dist.barrier()


dp_barrier = barrier


def allgather(thing: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The objects of the group's ranks, in the order of the ranks; any object that pickles."""
    if group not in _ALL_RANKS:
        return [thing]
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, thing)
    return gathered


def broadcast(thing: Any, group: CommGroup = CommGroup.WORLD) -> Any:
    """The object of the group's first rank; any object that pickles."""
    if group not in _ALL_RANKS:
        return thing
    holder = [thing]
    dist.broadcast_object_list(holder, 0)
    return holder[0]
