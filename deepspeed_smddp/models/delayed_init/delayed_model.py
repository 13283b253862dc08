"""``delayed_init`` and ``materialize``: a model without memory, and its values later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_smddp.models.delayed_init.destinations import (
    InPlace,
    Partitioned,
    Recipe,
    by_tensor,
)
from deepspeed_smddp.models.delayed_init.recording import Record, refusal

_RECIPE = "_smddp_delayed_init"

Model = TypeVar("Model", bound=nn.Module)


def delayed_init(build: Callable[[], Model], seed: int | None = None) -> Model:
    """The model that ``build`` returns, on the meta device, with a record of how to compute it.

    While ``build`` runs, ``torch.empty``, ``zeros``, ``ones``, ``full``, ``rand``, ``randn``,
    ``randint`` and ``randperm`` without a device give meta tensors; other tensors, for example
    those of ``torch.tensor`` and ``torch.arange``, have values as usual.

    Args:
        build: builds the model, including transformers' ``_init_weights``.
        seed: the seed that ordinary construction would give to ``torch.manual_seed``; None: the
            generator's current state (``materialize`` takes that of rank 0 for all ranks).

    Raises:
        RuntimeError: the model's code reads values while it is built, or draws random numbers into
            a tensor that has memory, so that their order can't be kept; or it calls
            ``trunc_normal_`` under a torch whose ``trunc_normal_`` can't be recorded.
    """
    if seed is None:
        state = torch.get_rng_state()
    else:
        state = torch.Generator().manual_seed(seed).get_state()
    record = Record(refusal())
    with record:
        model = build()
    setattr(model, _RECIPE, Recipe(record, model, state))
    return model


def is_delayed(model: nn.Module) -> bool:
    """Whether :func:`materialize` has still to fill in the model's values."""
    return hasattr(model, _RECIPE)


def materialize(
    model: Model, device: torch.device | str | None = None, *, ds_config: Any = None
) -> Model:
    """Fills in the values of a model from :func:`delayed_init`; all ranks call it.

    Between the two calls the model may be sharded by FSDP2's ``fully_shard``, parallelised by
    ``parallelize_module``, or cast.

    Args:
        model: the model that ``delayed_init`` returned.
        device: the parameters' device; default: that of their device mesh, else the current
            accelerator, else the CPU. It has no effect with ``ds_config``.
        ds_config: a DeepSpeed config with ZeRO stage 3, in any form that DeepSpeed takes.
            ``deepspeed.zero.Init`` partitions each parameter, in the type that the config trains
            in; call ``deepspeed.initialize`` afterwards.

    Raises:
        ValueError: the model has no record, or a parameter's shape differs from the recorded one.
        SmddpConfigError: the config's stage is not 3.
    """
    recipe = getattr(model, _RECIPE, None)
    if recipe is None:
        raise ValueError(
            f"this {type(model).__name__} was not built by delayed_init, or has its values already"
        )
    if dist.is_initialized():
        state = [recipe.state]
        dist.broadcast_object_list(state, src=0)
        recipe.state = state[0]
    target = Partitioned(ds_config) if ds_config is not None else InPlace(model, recipe, device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(recipe.state)
        for storage in recipe.record.replay(set(recipe.slots)):
            for slots in by_tensor(recipe.slots[storage.index]):
                target.fill(slots, slots[0].view.within(storage.memory))
    target.end()
    delattr(model, _RECIPE)
    return model
