"""One recorded operation, and the tensors without memory that it reads and writes.

The recording makes these, the replay carries them out. Storages are numbered by their address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class View:
    """A tensor's place in its storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool  # the tensor covers all of the storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The place of a meta tensor."""
        storage = tensor.untyped_storage()
        return cls(
            storage._cdata,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.numel() * tensor.itemsize == storage.nbytes(),
        )

    def within(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor at this place in a storage that has memory."""
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)


@dataclass
class Operation:
    """A call of ``function``, with a :class:`View` in place of each meta tensor."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]  # storages
    writes: frozenset[int]
    makes: tuple[View, ...]  # results with storages of their own
    overwrites: int | None  # a storage whose previous content does not matter
    random: bool

    def results(self) -> frozenset[int]:
        """The storages that it writes or makes."""
        return self.writes | {view.storage for view in self.makes}

    def touched(self) -> frozenset[int]:
        """The storages that it reads, writes or makes."""
        return self.reads | self.results()
