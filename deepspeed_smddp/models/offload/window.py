"""Which layers' activations are on the device: a moving window of horizon + 1 layers.

Forward pass, layers 0 to L-1: the copy of a layer's activations to the host starts at once, and
their device memory is freed when the layer horizon + 1 further on begins. The activations of the
last horizon + 1 layers stay on the device, as the backward pass begins with them. Backward pass:
when it reaches layer i, the copies of layers i-1 to i-horizon back to the device have been started,
and the device memory of layers above i has been freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_smddp.models.offload.host_memory import Copies, Copy, HostBuffer, HostMemory

Identity = StorageWeakRef


def identity_of(tensor: torch.Tensor) -> Identity:
    """Identifies a tensor's storage; while the result is kept, no other storage has its address."""
    return Identity(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass
class Statistics:
    """Counts since the start or the last ``reset_statistics()``. All sizes in bytes."""

    resident_bytes: int = 0  # of activations, on the device now
    peak_resident_bytes: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    late: int = 0  # activations that the backward pass needed before their copy was started
    passes: int = 0  # forward passes

    def hold(self, nbytes: int) -> None:
        """Counts bytes of activations that were added to the device, or freed (negative)."""
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)


@dataclass(frozen=True)
class Means:
    """The objects that all activations of a model share."""

    horizon: int
    host: HostMemory
    copies: Callable[[torch.device], Copies]
    statistics: Statistics


class Activation:
    """One storage that a layer saved, by any number of views. It has its own host buffer."""

    def __init__(self, storage: torch.UntypedStorage, version: int, means: Means) -> None:
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self._version = version
        self._means = means
        self._storage: torch.UntypedStorage | None = storage
        self._buffer: HostBuffer | None = None
        self._pending: Copy | None = None
        self._is_layers = False

    def count(self) -> None:
        """Counts the activation as resident, once it is known to be a layer's."""
        self._is_layers = True
        self._means.statistics.hold(self.nbytes)

    def copy_out(self) -> None:
        """Starts the copy to the host."""
        assert self._storage is not None
        self._buffer = self._means.host.take(self.nbytes)
        self._pending = self._buffer.last = self._means.copies(self.device).out(
            _bytes(self._storage), self._buffer.bytes[: self.nbytes], self._buffer.last
        )
        self._means.statistics.bytes_out += self.nbytes

    def free(self) -> None:
        """Frees the device memory, if the host has a copy."""
        if self._storage is None or self._buffer is None:
            return
        self._wait()
        self._storage = None
        self._means.statistics.hold(-self.nbytes)

    def fetch(self) -> bool:
        """Starts the copy to the device; False if it is there or the copy was started before."""
        if self._storage is not None:
            return False
        assert self._buffer is not None
        self._storage = torch.empty(
            self.nbytes, dtype=torch.uint8, device=self.device
        ).untyped_storage()
        self._means.statistics.hold(self.nbytes)
        self._pending = self._buffer.last = self._means.copies(self.device).back(
            self._buffer.bytes[: self.nbytes], _bytes(self._storage), self._buffer.last
        )
        self._means.statistics.bytes_back += self.nbytes
        return True

    def storage(self) -> torch.UntypedStorage:
        """The storage, ready for the caller's next computation."""
        if self.fetch():
            self._means.statistics.late += 1
        self._wait()
        assert self._storage is not None
        return self._storage

    def check(self, version: int) -> None:
        """Raises the error that autograd raises without hooks, if the version has changed.

        Callers can check only while they have the original tensor.
        """
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {version}, expected version {self._version}"
            )

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def __del__(self) -> None:
        if not self._is_layers:
            return
        if self._storage is not None:
            self._wait()  # later computation may reuse its memory
            self._means.statistics.hold(-self.nbytes)
        if self._buffer is not None:
            self._means.host.give_back(self._buffer)


class Saved:
    """The object that autograd keeps for one saved tensor: a view of an activation's storage."""

    __slots__ = ("__weakref__", "_offset", "_original", "_shape", "_type", "activation", "layer")

    def __init__(self, tensor: torch.Tensor, activation: Activation) -> None:
        self.activation = activation
        self.layer: Layer | None = None
        self._type = tensor.dtype
        self._shape = (tensor.size(), tensor.stride())
        self._offset = tensor.storage_offset()
        # Shares the version counter. It is dropped when the activation's device memory is freed.
        self._original: torch.Tensor | None = tensor.detach()

    def drop_original(self) -> None:
        """Drops the reference to the tensor before its device memory is freed."""
        if self._original is not None:
            self.activation.check(self._original._version)
            self._original = None

    def restore(self) -> torch.Tensor:
        """The tensor, with its original strides."""
        if self.layer is not None:
            self.layer.forward.reached(self.layer)
        if self._original is not None:
            self.activation.check(self._original._version)
            return self._original
        storage = self.activation.storage()
        restored = torch.empty(0, dtype=self._type, device=self.activation.device)
        return restored.set_(storage, self._offset, *self._shape)


class Layer:
    """One call of a layer in a forward pass, and the living tensors that it saved."""

    def __init__(self, forward: Forward, index: int) -> None:
        self.index = index
        self.forward = forward
        self._stays = index >= forward.expected - (forward.means.horizon + 1)
        self._saved: list[weakref.ref[Saved]] = []
        self._activations: dict[tuple[Identity, int], weakref.ref[Activation]] = {}

    def save(self, tensor: torch.Tensor) -> Saved:
        """Saves a tensor; views of one storage share one activation."""
        key = (identity_of(tensor), tensor._version)
        known = self._activations.get(key, lambda: None)()
        if known is not None:
            saved = Saved(tensor, known)
            self._add(saved)
        else:
            fresh = Activation(tensor.untyped_storage(), tensor._version, self.forward.means)
            saved = Saved(tensor, fresh)
            self.adopt(saved, key)
        return saved

    def adopt(self, saved: Saved, key: tuple[Identity, int]) -> None:
        """Adds a saved tensor that is known to be this layer's."""
        self._activations[key] = weakref.ref(saved.activation)
        self._add(saved)
        saved.activation.count()
        if not self._stays:
            saved.activation.copy_out()

    def _add(self, saved: Saved) -> None:
        saved.layer = self
        self._saved.append(weakref.ref(saved))

    def free(self) -> None:
        """Frees the device memory of activations that the host has a copy of."""
        if self._stays:
            return
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.drop_original()
        for activation in self._living():
            activation.free()

    def fetch(self) -> None:
        """Starts the copies to the device."""
        for activation in self._living():
            activation.fetch()

    def _living(self) -> list[Activation]:
        found = (reference() for reference in self._activations.values())
        return [activation for activation in found if activation is not None]


class Forward:
    """One forward pass and its backward pass. ``expected``: the number of layers it will call."""

    def __init__(self, means: Means, expected: int) -> None:
        self.means = means
        self.expected = expected
        self.layers: list[Layer] = []
        self._kept = 0  # the device memory of layers below it has been freed
        self._at: Layer | None = None

    def begin_layer(self) -> Layer:
        """Called before a layer computes."""
        layer = Layer(self, len(self.layers))
        self.layers.append(layer)
        self._free_below(layer.index - self.means.horizon)
        return layer

    def end(self) -> None:
        """Called at the end of the forward pass; frees what the host has a copy of."""
        self._free_below(len(self.layers))

    def reached(self, layer: Layer) -> None:
        """The backward pass needs the layer: frees those that it has left, fetches the next."""
        if layer is self._at:
            return
        self._at = layer
        for behind in self.layers[layer.index + 1 :]:
            behind.free()
        first = max(0, layer.index - self.means.horizon)
        for ahead in reversed(self.layers[first : layer.index]):
            ahead.fetch()

    def _free_below(self, index: int) -> None:
        for layer in self.layers[self._kept : max(index, 0)]:
            layer.free()
        self._kept = max(self._kept, index)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
