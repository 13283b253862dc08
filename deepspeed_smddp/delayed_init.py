"""Delayed parameter initialisation: build a model without its memory, fill in the values later.

    model = delayed_init(lambda: LlamaForCausalLM(config), seed=0)  # on the meta device
    fully_shard(model)
    materialize(model)

While the model is built every operation on its tensors is recorded. ``materialize`` replays them
in order on the CPU, with the random numbers that they would have drawn. A parameter's final
value is handed over as soon as it is known and freed, so that one rank holds one whole parameter at
a time besides its shards. Values are those of ordinary construction on the CPU with the same seed,
to the bit, whichever way the model is sharded. The idea is that of torchdistX's ``deferred_init``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_smddp import recording
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.zero import ds_config as ds_configs

_RECIPE = "_smddp_delayed_init"
_BATCH_BYTES = 64 << 20  # of parameters that are handed to DeepSpeed together

Model = TypeVar("Model", bound=nn.Module)


class _Slot:
    """A place in a module that holds a parameter or buffer without memory."""

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module = module
        self.name = name
        self.view = recording.View.of(tensor)
        self.is_parameter = isinstance(tensor, nn.Parameter)

    @property
    def tensor(self) -> Any:
        return getattr(self.module, self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Puts another tensor in, also where the module intercepts ``setattr``."""
        held = self.module._parameters if self.is_parameter else self.module._buffers
        held[self.name] = tensor  # type: ignore[assignment]


class _Recipe:
    def __init__(self, record: recording.Record, model: nn.Module, state: torch.Tensor) -> None:
        self.record = record
        self.state = state
        self.slots: dict[int, list[_Slot]] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    slot = _Slot(module, name, tensor)
                    self.slots.setdefault(slot.view.storage, []).append(slot)


def delayed_init(build: Callable[[], Model], seed: int | None = None) -> Model:
    """What ``build`` returns, on the meta device, with a record of how its values come about.

    ``torch.empty``, ``zeros``, ``ones``, ``full``, ``rand``, ``randn``, ``randint``, ``randperm``
    without a device give meta tensors while ``build`` runs; other tensors, such as those of
    ``torch.tensor`` and ``torch.arange``, have values as ever.

    Args:
        build: builds the model, transformers' ``_init_weights`` included.
        seed: as given to ``torch.manual_seed`` before ordinary construction; None: the generator as
            it stands (when the values are filled in, that of rank 0 holds for all ranks).

    Raises:
        RuntimeError: the model's code asks for values while it is built, or draws random numbers
            into a tensor that has memory, so that their order could not be kept; or it calls
            ``trunc_normal_`` under a torch whose own can't be recorded.
    """
    if seed is None:
        state = torch.get_rng_state()
    else:
        state = torch.Generator().manual_seed(seed).get_state()
    record = recording.Record(recording.trunc_normal_refusal())
    with record:
        model = build()
    setattr(model, _RECIPE, _Recipe(record, model, state))
    return model


def is_delayed(model: nn.Module) -> bool:
    """Whether the model still waits for :func:`materialize`."""
    return hasattr(model, _RECIPE)


def materialize(
    model: Model, device: torch.device | str | None = None, *, ds_config: Any = None
) -> Model:
    """Fills in the values of a model from :func:`delayed_init`; all ranks call it.

    Between the two the model may be sharded by FSDP2's ``fully_shard``, parallelised by
    ``parallelize_module`` or cast.

    Args:
        model: the one that ``delayed_init`` returned.
        device: of the parameters; default: that of their device mesh, else the current accelerator,
            else the CPU. Not with ``ds_config``.
        ds_config: a DeepSpeed config with ZeRO stage 3, in any form that DeepSpeed takes. Each
            parameter is partitioned by ``deepspeed.zero.Init``, in the type that the config trains
            in; ``deepspeed.initialize`` comes afterwards.

    Raises:
        ValueError: the model has no record, or a parameter has another shape than when recorded.
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
    target = _Partitioned(ds_config) if ds_config is not None else _InPlace(model, recipe, device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(recipe.state)
        for storage in recipe.record.replay(set(recipe.slots)):
            for slots in _by_tensor(recipe.slots[storage.index]):
                target.fill(slots, slots[0].view.within(storage.memory))
    target.end()
    delattr(model, _RECIPE)
    return model


def _by_tensor(slots: list[_Slot]) -> list[list[_Slot]]:
    # Tied parameters are one tensor in several slots.
    found: dict[tuple[recording.View, bool], list[_Slot]] = {}
    for slot in slots:
        found.setdefault((slot.view, slot.is_parameter), []).append(slot)
    return list(found.values())


class _InPlace:
    """Plain tensors, and DTensors, of which each rank keeps its part."""

    def __init__(
        self, model: nn.Module, recipe: _Recipe, device: torch.device | str | None
    ) -> None:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            where = device if device is not None else _default_device(tensor)
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

        # As Module.to_empty does, but for what has memory already.
        model._apply(placed)  # type: ignore[no-untyped-call]
        for slots in recipe.slots.values():
            for tied in _by_tensor(slots):
                for slot in tied[1:]:
                    slot.put(tied[0].tensor)

    def fill(self, slots: list[_Slot], value: torch.Tensor) -> None:
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
            # Every rank has the whole value: no rank sends.
            part = distribute_tensor(
                whole, target.device_mesh, target.placements, src_data_rank=None
            )
            local.copy_(part.to_local())
        else:
            target.copy_(value)

    def end(self) -> None:
        pass


class _Partitioned:
    """Parameters of DeepSpeed's ZeRO stage 3."""

    def __init__(self, config: Any) -> None:
        import deepspeed

        read: Mapping[str, Any] = ds_configs.read(config) or {}
        stage = (read.get("zero_optimization") or {}).get("stage", 0)
        if stage != 3:
            raise SmddpConfigError(
                'delayed initialisation by a DeepSpeed config needs "zero_optimization.stage": 3, '
                f"and it is {stage}; leave out ds_config= and call deepspeed.initialize afterwards"
            )
        self._init: Any = deepspeed.zero.Init
        self._config = config
        self._type: torch.dtype | None = None
        for key, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if (read.get(key) or {}).get("enabled"):
                self._type = kind
        self._waiting = nn.ParameterList()
        self._bytes = 0

    def fill(self, slots: list[_Slot], value: torch.Tensor) -> None:
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
