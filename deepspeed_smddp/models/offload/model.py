"""Installs activation offloading on a model, by hooks of modules and of saved tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from deepspeed_smddp.models.offload import window
from deepspeed_smddp.models.offload.host_memory import Copies, HostMemory

_MARK = "_smddp_activation_offload"


def offload_activations(
    module: nn.Module,
    horizon: int = 2,
    *,
    layers: Iterable[nn.Module] | None = None,
    directory: str | None = None,
    min_bytes: int = 4096,
) -> Offload:
    """Moves what the layers of ``module`` save for the backward pass to host memory and back.

    With activation checkpointing that is each layer's input; without it, everything that autograd
    saves in the layers, except parameters and buffers. The activations of at most ``horizon + 1``
    layers are on the device at once. Gradients have the same bits as without offloading. A model
    can have one offloading; ``remove()`` removes it.

    Args:
        module: the model whose ``forward`` the training loop calls; also a DeepSpeed engine's
            ``module``, or a model under FSDP2's ``fully_shard``.
        horizon: layers ahead of the backward pass whose activations are fetched; at least 1.
        layers: the layers; default: the members of each outermost ``ModuleList`` or ``Sequential``
            of two or more modules of one class.
        directory: map host memory from unnamed files in it; default: pinned memory if there is an
            accelerator, plain memory if not.
        min_bytes: smaller storages stay on the device.

    Raises:
        ValueError: the horizon is below 1, the model has offloading already, or no layers are
            found in it.
        NotADirectoryError: there is no such directory.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ValueError(f"horizon is {horizon!r}, but may hold a number of layers of at least 1")
    if hasattr(module, _MARK):
        raise ValueError(
            f"activations of this {type(module).__name__} are offloaded already; call remove() on "
            "the result of the first call before the next"
        )
    found = list(layers) if layers is not None else list(find_layers(module))
    if not found:
        raise ValueError(
            f"no layers were found in {type(module).__name__}: it has no ModuleList or Sequential "
            "of two or more modules of one class; name them with layers="
        )
    return Offload(
        module, found, horizon, HostMemory(torch.accelerator.is_available(), directory), min_bytes
    )


def find_layers(module: nn.Module) -> Iterable[nn.Module]:
    """The members of the outermost lists of two or more modules of one class, in order."""
    for child in module.children():
        members = list(child.children())
        if (
            isinstance(child, (nn.ModuleList, nn.Sequential))
            and len(members) > 1
            and len({type(member) for member in members}) == 1
        ):
            yield from members
        else:
            yield from find_layers(child)


class Offload:
    """Activation offloading on one model. Made by :func:`offload_activations`."""

    def __init__(
        self,
        module: nn.Module,
        layers: list[nn.Module],
        horizon: int,
        host: HostMemory,
        min_bytes: int,
    ) -> None:
        self.horizon = horizon
        self.layers = layers
        self.statistics = window.Statistics()
        self._host = host
        self._module = module
        self._min_bytes = min_bytes
        self._means = window.Means(horizon, host, cache(Copies), self.statistics)
        self._expected = len(layers)
        self._forward: window.Forward | None = None
        self._scope: saved_tensors_hooks | None = None
        self._calls = 0  # of the module, nested in one another
        self._inside: list[nn.Module] = []  # layers being computed, nested in one another
        self._layer: window.Layer | None = None  # the latest layer
        self._buffers: set[window.Identity] = set()
        self._inputs: set[window.Identity] = set()  # of the latest layer
        # Tensors saved since that layer ended; one of them may be the input of the next layer.
        self._between: dict[tuple[window.Identity, int], weakref.ref[window.Saved]] = {}
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begin, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]
        for layer in layers:
            self._handles += [
                layer.register_forward_pre_hook(self._begin_layer, prepend=True, with_kwargs=True),
                layer.register_forward_hook(self._end_layer, always_call=True),
            ]
        setattr(module, _MARK, self)

    @property
    def host_bytes(self) -> int:
        """Host memory held, in use or free for the next activation."""
        return self._host.nbytes

    def reset_statistics(self) -> None:
        """Starts counting anew; resident activations stay counted."""
        now = self.statistics
        now.peak_resident_bytes = now.resident_bytes
        now.bytes_out = now.bytes_back = now.late = now.passes = 0

    def remove(self) -> None:
        """Removes offloading and frees host memory; living graphs keep the tensors they saved.

        Raises:
            RuntimeError: within a forward pass.
        """
        if self._forward is not None:
            raise RuntimeError("activation offloading can't be removed within a forward pass")
        self._host.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if getattr(self._module, _MARK, None) is self:
            delattr(self._module, _MARK)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        if self._calls > 1 or not torch.is_grad_enabled():
            return
        self._forward = window.Forward(self._means, self._expected)
        self._buffers = {window.identity_of(b) for b in module.buffers()}
        self._scope = saved_tensors_hooks(self._pack, _unpack)
        self._scope.__enter__()
        self.statistics.passes += 1

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls = max(0, self._calls - 1)  # an earlier hook may have raised
        if self._calls > 0 or self._forward is None:
            return
        assert self._scope is not None
        self._scope.__exit__()
        self._forward.end()
        if self._forward.layers:
            self._expected = len(self._forward.layers)
        self._forward = self._scope = self._layer = None
        self._inside.clear()
        self._between.clear()
        self._inputs.clear()
        self._buffers.clear()

    def _begin_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        # In a recomputation, which is part of the backward pass, there is no forward pass.
        if self._forward is None:
            return
        self._inside.append(layer)
        if len(self._inside) > 1:
            return
        self._layer = self._forward.begin_layer()
        tensors = [value for value in (*args, *kwargs.values()) if _movable(value)]
        self._inputs = {window.identity_of(tensor) for tensor in tensors}
        # checkpoint(layer, x) saved x before it called the layer.
        for key, reference in self._between.items():
            saved = reference()
            if saved is not None and key[0] in self._inputs:
                self._layer.adopt(saved, key)
        self._between.clear()

    def _end_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._inside and self._inside[-1] is layer:
            self._inside.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | window.Saved:
        # The result of a collective in flight (AsyncCollectiveTensor) is replaced by its tensor.
        wait = getattr(tensor, "trigger_wait", None)
        tensor = tensor if wait is None else wait()
        if not self._moves(tensor):
            # A tensor with a gradient function would keep itself alive.
            return tensor if tensor.is_leaf else tensor.detach()
        storage = window.identity_of(tensor)
        # Reentrant checkpointing saves a layer's input after the layer has ended.
        if self._layer is not None and (self._inside or storage in self._inputs):
            return self._layer.save(tensor)
        saved = window.Saved(
            tensor, window.Activation(tensor.untyped_storage(), tensor._version, self._means)
        )
        self._between.setdefault((storage, tensor._version), weakref.ref(saved))
        return saved

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not _movable(tensor) or tensor.untyped_storage().nbytes() < self._min_bytes:
            return False
        base = tensor._base if tensor._base is not None else tensor
        if isinstance(base, (nn.Parameter, nn.Buffer)):
            return False
        return window.identity_of(tensor) not in self._buffers


def _movable(value: Any) -> bool:
    # Subclasses have no storage of their own (DTensor), or more state than their bytes.
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _unpack(packed: torch.Tensor | window.Saved) -> torch.Tensor:
    return packed.restore() if isinstance(packed, window.Saved) else packed
