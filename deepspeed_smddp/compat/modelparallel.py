"""``smdistributed.modelparallel.torch``: initialisation, ranks, groups, and ``smp.step``.

There is no pipeline and no tensor parallelism here, so that every rank is a data-parallel rank, and
the groups of all other kinds have one member.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.compat import parameters
from deepspeed_smddp.compat.parameters import ModelParallelParameters
from deepspeed_smddp.errors import SmddpConfigError

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


rank = dp_rank = rdp_rank = dist.get_rank
size = dp_size = rdp_size = dist.get_world_size


def local_rank() -> int:
    """This process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """The number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size())


def pp_rank() -> int:
    """The rank in a group of one member."""
    return 0


def pp_size() -> int:
    """The size of a group of one member."""
    return 1


tp_rank = mp_rank = pp_rank
tp_size = mp_size = pp_size


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


class StepOutput:
    """The values of one output of a step, one per micro-batch."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs

    def reduce_mean(self) -> Any:
        """The mean over the micro-batches."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> Any:
        """The sum over the micro-batches."""
        return functools.reduce(lambda a, b: a + b, self.outputs)

    def concat(self) -> torch.Tensor:
        """The tensors one after the other, along the first dimension."""
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """The tensors along a new first dimension."""
        return torch.stack(self.outputs)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[..., Any]:
    """Decorates a function that runs the forward pass, and the backward pass by the model.

    Each tensor in its arguments, also inside lists, tuples and dictionaries, is cut along its first
    dimension into micro-batches; the parameter ``microbatches`` is their number. All other values
    are passed unchanged.

    Args:
        function: given if the decorator is used without parentheses.
        non_split_inputs: names of arguments that are not cut.
        input_split_axes: another dimension to cut, by the name of the argument.
        detach_outputs: returned tensors have no graph.

    Returns:
        A function that returns a :class:`StepOutput` in place of each value that ``function``
        returns: of its result, or of the members of a tuple, list or mapping.

    Raises:
        SmddpConfigError: at a call with a tensor that does not divide into the micro-batches.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )

    signature = inspect.signature(function)
    whole, axes = set(non_split_inputs), dict(input_split_axes or {})

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count = state.cfg.microbatches
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        returned = []
        cut = {
            name: [value] * count
            if name in whole
            else _cut(value, count, axes.get(name, 0), f"the argument {name}")
            for name, value in given.items()
        }
        for i in range(count):
            for name in given:
                given[name] = cut[name][i]
            returned.append(function(*bound.args, **bound.kwargs))
        return _collect(returned, detach_outputs)

    return wrapper


def _cut(value: Any, count: int, axis: int, where: str) -> list[Any]:
    if count == 1:
        return [value]
    if isinstance(value, torch.Tensor):
        if value.dim() <= axis or value.shape[axis] % count:
            raise SmddpConfigError(
                f"{where} of an smp.step has the shape {list(value.shape)}, whose dimension {axis} "
                f'does not divide into "microbatches": {count}; drop incomplete batches '
                "(drop_last=True), or name the argument in non_split_inputs"
            )
        return list(value.chunk(count, dim=axis))
    if isinstance(value, Mapping):
        parts = {key: _cut(item, count, axis, where) for key, item in value.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(count)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        pieces = [_cut(item, count, axis, where) for item in value]
        return [type(value)(piece[i] for piece in pieces) for i in range(count)]
    return [value] * count


def _collect(returned: list[Any], detach: bool) -> Any:
    first = returned[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: _collect([item[key] for item in returned], detach) for key in first}
    if isinstance(first, (list, tuple)):
        return tuple(_collect(list(items), detach) for items in zip(*returned, strict=True))
    if detach:
        returned = [r.detach() if isinstance(r, torch.Tensor) else r for r in returned]
    return StepOutput(returned)
