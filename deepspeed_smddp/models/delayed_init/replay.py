"""Recorded operations, and carrying them out on the CPU as far as the wanted values need them.

Storages of tensors without memory are numbered by their address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


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


def replay(
    operations: Sequence[Operation], sizes: Mapping[int, int], wanted: set[int]
) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Yields each wanted storage, its number and memory, once its content is final.

    Frees a storage after its last use. Every operation that draws random numbers is carried out;
    the others only if a wanted storage depends on them. ``sizes``: bytes of each recorded storage.
    """
    plan = _Plan(operations, wanted)
    memory: dict[int, torch.UntypedStorage] = {}

    def storage(index: int) -> torch.UntypedStorage:
        if index not in memory:
            memory[index] = torch.empty(sizes[index], dtype=torch.uint8).untyped_storage()
        return memory[index]

    def real(value: Any) -> Any:
        if isinstance(value, View):
            return value.within(storage(value.storage))
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value

    for index in wanted - set(plan.last_write):
        if index in sizes:
            yield index, torch.zeros(sizes[index], dtype=torch.uint8).untyped_storage()
    for position, operation in enumerate(operations):
        if not plan.needed[position]:
            continue
        result = operation.function(
            *tree_map(real, operation.args), **tree_map(real, operation.kwargs)
        )
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if operation.makes:
            fresh = results[-len(operation.makes) :]
            for view, tensor in zip(operation.makes, fresh, strict=True):
                memory[view.storage] = tensor.untyped_storage()
        for index in operation.touched():
            if plan.last_write.get(index) == position:
                yield index, storage(index)
        for index in plan.dead[position]:
            memory.pop(index, None)


class _Plan:
    """By position of an operation: whether it is ``needed``, and the storages ``dead`` after it.

    ``last_write`` has the position of the last operation that writes each wanted storage.
    """

    def __init__(self, operations: Sequence[Operation], wanted: set[int]) -> None:
        self.needed = [False] * len(operations)
        self.dead: list[frozenset[int]] = [frozenset()] * len(operations)
        self.last_write: dict[int, int] = {}
        # Backwards; `later` holds the storages whose content a later operation reads.
        later: set[int] = set()
        for position in range(len(operations) - 1, -1, -1):
            operation = operations[position]
            results = operation.results()
            final = {index for index in results & wanted if index not in self.last_write}
            self.last_write.update(dict.fromkeys(final, position))
            self.dead[position] = operation.touched() - later
            matters = bool(final or results & later)
            self.needed[position] = operation.random or matters
            if matters:
                later -= {view.storage for view in operation.makes}
                if operation.overwrites is not None:
                    later.discard(operation.overwrites)
                later |= operation.reads
