"""Which layers' activations are on the device: a window of horizon + 1 layers that moves.

Forward pass, layers 0 to L-1: what a layer saves leaves at once, and its memory is let go when the
layer horizon + 1 further on begins. The last horizon + 1 layers stay, as the backward pass begins
with them. Backward pass: when it reaches layer i, copies of the layers i-1 to i-horizon have been
started, and those above i are let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_smddp.offload.copies import Copies, Copy
from deepspeed_smddp.offload.host_memory import HostBuffer, HostMemory

Identity = StorageWeakRef


def identity_of(tensor: torch.Tensor) -> Identity:
    """Tells a tensor's storage from any other; no other has its address while this is kept."""
    return Identity(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass
class Statistics:
    """Counts since the start or the last ``reset_statistics()``. All sizes in bytes."""

    resident_bytes: int = 0  # of what layers have saved, on the device now
    peak_resident_bytes: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    late: int = 0  # activations that the backward pass needed before their copy was asked for
    passes: int = 0  # forward passes

    def hold(self, nbytes: int) -> None:
        """Activations came to the device, or left it (negative)."""
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)


@dataclass(frozen=True)
class Means:
    """What all activations of a model share."""

    horizon: int
    host: HostMemory
    copies: Callable[[torch.device], Copies]
    statistics: Statistics


class Activation:
    """One storage that a layer saved, whichever views of it were. Host memory is its own."""

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
        """The activation turned out to be a layer's."""
        self._is_layers = True
        self._means.statistics.hold(self.nbytes)

    def leave(self) -> None:
        """Starts the copy to the host."""
        assert self._storage is not None
        self._buffer = self._means.host.take(self.nbytes)
        self._pending = self._buffer.last = self._means.copies(self.device).out(
            _bytes(self._storage), self._buffer.bytes[: self.nbytes], self._buffer.last
        )
        self._means.statistics.bytes_out += self.nbytes

    def let_go(self) -> None:
        """Frees the device's memory, where the host has a copy."""
        if self._storage is None or self._buffer is None:
            return
        self._settle()
        self._storage = None
        self._means.statistics.hold(-self.nbytes)

    def fetch(self) -> bool:
        """Starts the copy to the device; False if the activation is there or on its way."""
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
        """The storage, in order for what the caller computes next."""
        if self.fetch():
            self._means.statistics.late += 1
        self._settle()
        assert self._storage is not None
        return self._storage

    def check(self, version: int) -> None:
        """Raises the error that autograd raises without hooks, where the original is at hand."""
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {version}, expected version {self._version}"
            )

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def __del__(self) -> None:
        if not self._is_layers:
            return
        if self._storage is not None:
            self._settle()  # its memory is the computation's next
            self._means.statistics.hold(-self.nbytes)
        if self._buffer is not None:
            self._means.host.give_back(self._buffer)


class Saved:
    """What autograd keeps in place of one saved tensor: a view of an activation's storage."""

    __slots__ = ("__weakref__", "_offset", "_original", "_shape", "_type", "activation", "layer")

    def __init__(self, tensor: torch.Tensor, activation: Activation) -> None:
        self.activation = activation
        self.layer: Layer | None = None
        self._type = tensor.dtype
        self._shape = (tensor.size(), tensor.stride())
        self._offset = tensor.storage_offset()
        # Shares the version counter. Its storage is dropped with the activation's.
        self._original: torch.Tensor | None = tensor.detach()

    def drop_original(self) -> None:
        """The activation leaves the device."""
        if self._original is not None:
            self.activation.check(self._original._version)
            self._original = None

    def restore(self) -> torch.Tensor:
        """The tensor, with the strides that it had."""
        if self.layer is not None:
            self.layer.reached()
        if self._original is not None:
            self.activation.check(self._original._version)
            return self._original
        storage = self.activation.storage()
        restored = torch.empty(0, dtype=self._type, device=self.activation.device)
        return restored.set_(storage, self._offset, *self._shape)


class Layer:
    """One call of a layer in a forward pass, and what it saved that still lives."""

    def __init__(self, forward: Forward, index: int) -> None:
        self.index = index
        self._forward = forward
        self._stays = index >= forward.expected - (forward.means.horizon + 1)
        self._saved: list[weakref.ref[Saved]] = []
        self._activations: dict[tuple[Identity, int], weakref.ref[Activation]] = {}

    def save(self, tensor: torch.Tensor) -> Saved:
        """Takes in a tensor; views of one storage become one activation."""
        key = (identity_of(tensor), tensor._version)
        known = self._activations.get(key)
        activation = known() if known is not None else None
        if activation is not None:
            saved = Saved(tensor, activation)
            self._add(saved)
            return saved
        saved = Saved(
            tensor, Activation(tensor.untyped_storage(), tensor._version, self._forward.means)
        )
        self.adopt(saved, key)
        return saved

    def adopt(self, saved: Saved, key: tuple[Identity, int]) -> None:
        """Takes over what turned out to be this layer's."""
        self._activations[key] = weakref.ref(saved.activation)
        self._add(saved)
        saved.activation.count()
        if not self._stays:
            saved.activation.leave()

    def _add(self, saved: Saved) -> None:
        saved.layer = self
        self._saved.append(weakref.ref(saved))

    def let_go(self) -> None:
        """Frees what is on the host."""
        if self._stays:
            return
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.drop_original()
        for activation in self._living():
            activation.let_go()

    def fetch(self) -> None:
        """Starts the copies to the device."""
        for activation in self._living():
            activation.fetch()

    def reached(self) -> None:
        """The backward pass asks for something of this layer."""
        self._forward.reached(self)

    def _living(self) -> list[Activation]:
        found = (reference() for reference in self._activations.values())
        return [activation for activation in found if activation is not None]


class Forward:
    """One forward pass and its backward pass. ``expected``: how many layers it will have."""

    def __init__(self, means: Means, expected: int) -> None:
        self.means = means
        self.expected = expected
        self.layers: list[Layer] = []
        self._kept = 0  # layers below it have been let go
        self._at: Layer | None = None

    def begin_layer(self) -> Layer:
        """A layer is about to compute."""
        layer = Layer(self, len(self.layers))
        self.layers.append(layer)
        self._let_go_below(layer.index - self.means.horizon)
        return layer

    def end(self) -> None:
        """The forward pass is over; of what leaves, nothing stays."""
        self._let_go_below(len(self.layers))

    def reached(self, layer: Layer) -> None:
        """Lets go of what lies behind the backward pass and fetches what lies before it."""
        if layer is self._at:
            return
        self._at = layer
        for behind in self.layers[layer.index + 1 :]:
            behind.let_go()
        first = max(0, layer.index - self.means.horizon)
        for ahead in reversed(self.layers[first : layer.index]):
            ahead.fetch()

    def _let_go_below(self, index: int) -> None:
        for layer in self.layers[self._kept : max(index, 0)]:
            layer.let_go()
        self._kept = max(self._kept, index)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
