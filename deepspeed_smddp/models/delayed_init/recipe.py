"""The parameters and buffers of a delayed model, with the record that has their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed_smddp.models.delayed_init.operation import View
from deepspeed_smddp.models.delayed_init.recording import Record


class Slot:
    """A place in a module that holds a parameter or buffer without memory."""

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module = module
        self.name = name
        self.view = View.of(tensor)
        self.is_parameter = isinstance(tensor, nn.Parameter)

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
                    slot = Slot(module, name, tensor)
                    self.slots.setdefault(slot.view.storage, []).append(slot)


def by_tensor(slots: list[Slot]) -> list[list[Slot]]:
    """Groups slots that hold the same tensor: tied parameters are one tensor in several slots."""
    found: dict[tuple[View, bool], list[Slot]] = {}
    for slot in slots:
        found.setdefault((slot.view, slot.is_parameter), []).append(slot)
    return list(found.values())
