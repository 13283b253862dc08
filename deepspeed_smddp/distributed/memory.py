"""CPU memory that the ranks of a host share, so that collectives read peers' tensors in place.

A tensor in this memory is an ordinary tensor in every other respect; ``docs/memory.md`` describes
what a forked process sees of it. ``SMDDP_SHARED_ALLOCATOR=1`` puts every CPU tensor of 64 KiB and
more into it; :func:`share_` and :func:`shared_empty` put single tensors there. All functions raise
``ImportError`` if the extension is missing or was built for another torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.distributed import extension

__all__ = ["install", "is_shared", "share_", "shared_empty", "statistics", "trim"]

_Shareable = TypeVar("_Shareable", bound="torch.Tensor | torch.nn.Module")


def shared_empty(size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous CPU tensor in shared memory, not initialised.

    If the kernel provides no shared memory, and in a forked process, it has ordinary memory.

    Args:
        size: the tensor's shape; a number means one dimension.
        dtype: the type of its elements; default: torch's default type.

    Raises:
        RuntimeError: a dimension is negative, or there is not enough memory.
    """
    shape = [size] if isinstance(size, int) else list(size)
    return extension.core.shared_empty(shape, dtype or torch.get_default_dtype())


def share_(what: _Shareable) -> _Shareable:
    """Moves a tensor, or all parameters and buffers of a module, into shared memory, in place.

    The whole storage moves, so that views of a tensor remain views of it. An array that
    ``tensor.numpy()`` returned earlier has the old address and must not be used any more. A tensor
    whose memory is not torch's own (``torch.from_numpy``, a mapped file) moves alone: its views and
    the array keep the old memory. Of a ``DTensor``, this process's part moves. Gradients and
    tensors on other devices do not move. If the kernel provides no shared memory, and in a forked
    process, nothing moves.

    Returns:
        ``what`` itself.

    Raises:
        TypeError: ``what`` is neither a tensor nor a module.
        ValueError: ``what`` is a tensor that is sparse or not on the CPU.
    """
    if isinstance(what, torch.Tensor):
        for part in _parts(what):
            _share_tensor(part)
        return what
    if not isinstance(what, torch.nn.Module):
        raise TypeError(f"share_() moves a tensor or a module, not {type(what).__name__}")
    for tensor in chain.from_iterable(map(_parts, chain(what.parameters(), what.buffers()))):
        movable = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if movable and tensor.numel() > 0 and not extension.core.is_shared(tensor):
            _share_tensor(tensor)
    return what


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the other ranks of the host can reach all of the tensor's memory.

    For a ``DTensor``: of this process's part.
    """
    return all(extension.core.is_shared(part) for part in _parts(tensor))


def statistics() -> extension.core.MemoryStatistics:
    """This process's use of shared memory: bytes, and numbers of tensors and segments."""
    return extension.core.memory_statistics()


def trim() -> None:
    """Returns the pages of freed tensors to the kernel; else up to 64 MiB wait for new ones."""
    extension.core.trim_memory()


def install() -> None:
    """Puts every CPU tensor of 64 KiB and more that is created from now on into shared memory.

    This can't be undone. ``SMDDP_SHARED_ALLOCATOR=1`` does it at the end of ``import torch``, or at
    ``import deepspeed_smddp`` if ``SMDDP_AUTOLOAD=0``.
    """
    extension.core.install_shared_allocator()


def install_if_asked() -> None:
    """Calls :func:`install` if ``SMDDP_SHARED_ALLOCATOR`` is ``1``.

    Raises:
        SmddpConfigError: a variable holds a value that it may not hold.
    """
    if settings.current().process.shared_allocator:
        install()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that own memory: a wrapper such as ``DTensor`` gives those that it wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from _parts(part)


def _share_tensor(tensor: torch.Tensor) -> None:
    if extension.core.share_storage(tensor):
        return
    storage = tensor.untyped_storage()
    moved = extension.core.shared_empty([storage.nbytes()], torch.uint8)
    if not extension.core.is_shared(moved):
        return
    moved.untyped_storage().copy_(storage)
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        moved.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
