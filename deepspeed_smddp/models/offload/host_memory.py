"""Host buffers for activations: plain memory, pinned memory, or mapped files; reused."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left, insort

import torch

from deepspeed_smddp.models.offload.copies import Copy


class HostBuffer:
    """Host memory of ``nbytes`` bytes; ``last`` is the latest copy that reads or writes it."""

    __slots__ = ("bytes", "last", "nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes = memory
        self.nbytes = memory.numel()
        self.last: Copy | None = None


class HostMemory:
    """Lends buffers, and reuses a buffer that was given back for the next request that fits.

    There are never more buffers than were in use at the same time: if no free buffer is large
    enough, a free one is released and a new one allocated.

    Args:
        pinned: whether buffers are page-locked, as an accelerator needs for copies that run beside
            its computation. Mapped files cannot be page-locked.
        directory: buffers are mapped from files there. The files have no name, so that none is left
            over however the process ends.
    """

    def __init__(self, pinned: bool, directory: str | None = None) -> None:
        if directory is not None and not os.path.isdir(directory):
            raise NotADirectoryError(
                f"activations are to be offloaded to {directory}, which is not a directory; make "
                "it, or leave out the directory to use host memory"
            )
        self._pinned = pinned and directory is None
        self._directory = directory
        self._free: list[HostBuffer] = []  # by size
        self._closed = False
        self.nbytes = 0  # in use or free

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least ``nbytes`` bytes.

        Raises:
            OSError: the file system of ``directory`` has no room.
        """
        place = bisect_left(self._free, nbytes, key=lambda buffer: buffer.nbytes)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self.nbytes -= self._free.pop().nbytes
        buffer = HostBuffer(self._allocate(nbytes))
        self.nbytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Returns a buffer whose contents are no longer needed."""
        if self._closed:
            self.nbytes -= buffer.nbytes
            return
        insort(self._free, buffer, key=lambda free: free.nbytes)

    def close(self) -> None:
        """Frees the free buffers, and from now on each buffer that is given back."""
        self._closed = True
        self.nbytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._directory is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        with tempfile.TemporaryFile(dir=self._directory, prefix="smddp-activations-") as file:
            # Reserves the space now: a full disk is an error here, and SIGBUS at a later write.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
