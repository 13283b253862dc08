"""``delayed_init`` and ``materialize``: a model without memory, and its values later.

They go into the model's own tensors, or into ZeRO-3's partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_smddp.config import ds_json as ds_configs
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.models.delayed_init.recording import Record
from deepspeed_smddp.models.delayed_init.replay import View

_RECIPE = "_smddp_delayed_init"
_BATCH_BYTES = 64 << 20  # of parameters that DeepSpeed partitions in one call

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
            a tensor that has memory, so that their order can't be kept; or ``trunc_normal_`` of
            this torch can't be recorded.
    """
    if seed is None:
        state = torch.get_rng_state()
    else:
        state = torch.Generator().manual_seed(seed).get_state()
    record = Record()
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
        for index, memory in recipe.record.replay(set(recipe.slots)):
            for slots in by_tensor(recipe.slots[index]):
                target.fill(slots, slots[0].view.within(memory))
    target.end()
    delattr(model, _RECIPE)
    return model


@dataclass(frozen=True)
class Slot:
    """A place in a module that holds a parameter or buffer without memory."""

    module: nn.Module
    name: str
    view: View
    is_parameter: bool

    @property
    def tensor(self) -> Any:
        """The tensor that the module holds now."""
        return getattr(self.module, self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor, even if the module intercepts ``setattr``."""
        held = self.module._parameters if self.is_parameter else self.module._buffers
        held[self.name] = tensor  # type: ignore[assignment]


class Recipe:
    """What :func:`materialize` needs: the record, the generator's state, the slots by storage."""

    def __init__(self, record: Record, model: nn.Module, state: torch.Tensor) -> None:
        self.record = record
        self.state = state
        self.slots: dict[int, list[Slot]] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    view = View.of(tensor)
                    slot = Slot(module, name, view, isinstance(tensor, nn.Parameter))
                    self.slots.setdefault(view.storage, []).append(slot)


def by_tensor(slots: list[Slot]) -> list[list[Slot]]:
    """Groups slots that hold the same tensor: tied parameters are one tensor in several slots."""
    found: dict[tuple[View, bool], list[Slot]] = {}
    for slot in slots:
        found.setdefault((slot.view, slot.is_parameter), []).append(slot)
    return list(found.values())


class InPlace:
    """Fills plain tensors, and DTensors, of which each rank keeps its own part."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device | str | None) -> None:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            where = device if device is not None else _default_device(tensor)
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

        # As Module.to_empty does, but tensors that have memory keep their values.
        model._apply(placed)  # type: ignore[no-untyped-call]
        for slots in recipe.slots.values():
            for tied in by_tensor(slots):
                for slot in tied[1:]:
                    slot.put(tied[0].tensor)

    def fill(self, slots: list[Slot], value: torch.Tensor) -> None:
        """Copies the value into the slots' tensor, or this rank's part of it."""
        from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

        target = slots[0].tensor
        if target.shape != value.shape:
            raise ValueError(
                f"{slots[0].name} of {type(slots[0].module).__name__} has the shape "
                f"{tuple(target.shape)}, but was recorded with {tuple(value.shape)}; materialize "
                "the model before its parameters are reshaped"
            )
        if isinstance(target, DTensor):
            local = target.to_local()
            whole = value.to(local.device, local.dtype)
            # Every rank has the whole value, so that no rank sends it.
            part = distribute_tensor(
                whole, target.device_mesh, target.placements, src_data_rank=None
            )
            local.copy_(part.to_local())
        else:
            target.copy_(value)

    def end(self) -> None:
        """Nothing is left to do."""


class Partitioned:
    """Has ``deepspeed.zero.Init`` partition the parameters (ZeRO stage 3)."""

    def __init__(self, config: Any) -> None:
        import deepspeed

        read: Mapping[str, Any] = ds_configs.read(config) or {}
        stage = ds_configs.at(read, "zero_optimization.stage") or 0
        if stage != 3:
            raise SmddpConfigError(
                'delayed initialisation by a DeepSpeed config needs "zero_optimization.stage": 3, '
                f"and it is {stage}; leave out ds_config= and call deepspeed.initialize afterwards"
            )
        self._init: Any = deepspeed.zero.Init
        self._config = config
        types = {"fp16": torch.float16, "bf16": torch.bfloat16}
        enabled = (kind for key, kind in types.items() if ds_configs.at(read, f"{key}.enabled"))
        self._type: torch.dtype | None = next(enabled, None)
        self._waiting = nn.ParameterList()
        self._bytes = 0

    def fill(self, slots: list[Slot], value: torch.Tensor) -> None:
        """Makes a new parameter of the value, and partitions it with the next batch."""
        old = slots[0].tensor
        kind = self._type if self._type is not None and value.is_floating_point() else value.dtype
        value = value.to(kind, copy=True, memory_format=torch.contiguous_format)
        if not slots[0].is_parameter:
            for slot in slots:
                slot.put(value)
            return
        parameter = nn.Parameter(value, requires_grad=old.requires_grad)
        parameter.__dict__.update(old.__dict__)
        for slot in slots:
            slot.put(parameter)
        self._waiting.append(parameter)
        self._bytes += value.nbytes
        if self._bytes >= _BATCH_BYTES:
            self._partition()

    def end(self) -> None:
        """Partitions the parameters that still wait."""
        if len(self._waiting):
            self._partition()

    def _partition(self) -> None:
        self._init(module=self._waiting, config_dict_or_path=self._config)
        self._waiting, self._bytes = nn.ParameterList(), 0


def _default_device(tensor: torch.Tensor) -> torch.device:
    mesh = getattr(tensor, "device_mesh", None)  # a DTensor's
    if mesh is not None:
        return torch.device(mesh.device_type)
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return torch.device("cpu")
    return torch.device(current.type, torch.accelerator.current_device_index())
