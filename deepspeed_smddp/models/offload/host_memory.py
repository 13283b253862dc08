"""Host buffers for activations, and copies between them and the device.

Buffers are plain memory, pinned memory or mapped files, and are reused. On devices with streams,
copies run beside computation. Stream calls are those of ``torch.accelerator``; they have not been
run on hardware. The tests run their order on a substitute that executes each copy as late as the
order permits.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_left, insort
from collections import deque
from weakref import WeakSet

import torch


class Copy:
    """A copy that has been started on a stream."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        """Orders the caller's later computation after the copy; does not block the host."""
        torch.accelerator.current_stream(self._device).wait_event(self.event)


class Copies:
    """Starts copies between a device and host buffers, after the caller's computation so far.

    On an accelerator each direction has a stream beside the caller's, so that both copy engines can
    work. From host to host each copy is complete when the call returns: there is no ``Copy``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [] if device.type == "cpu" else [torch.Stream(device) for _ in range(2)]

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy | None:
        """Copies to the host. ``after``: the latest copy that uses the same host buffer."""
        return self._start(0, source, host, after)

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy | None:
        """Copies from the host to memory that the caller's stream allocated.

        The memory may have belonged to another tensor that the caller's computation uses.
        """
        return self._start(1, host, target, after)

    def _start(
        self, number: int, source: torch.Tensor, target: torch.Tensor, after: Copy | None
    ) -> Copy | None:
        if not self._streams:
            target.copy_(source)
            return None
        stream = self._streams[number]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            stream.wait_event(after.event)
        with stream:
            target.copy_(source, non_blocking=True)
        return Copy(stream.record_event(), self._device)


class HostBuffer:
    """Host memory of ``nbytes`` bytes; ``last`` is the latest copy that reads or writes it."""

    __slots__ = ("__weakref__", "bytes", "last", "nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes = memory
        self.nbytes = memory.numel()
        self.last: Copy | None = None


class HostMemory:
    """Lends buffers, and reuses a buffer that was given back for the next request that fits.

    There are never more buffers than were in use at the same time: if no free buffer is large
    enough, a free one is released and a new one allocated. They are ``pinned``, as an accelerator
    needs for copies beside its computation, or mapped from files in ``directory``, which cannot be.
    The files have no name, so that none is left over however the process ends.
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
        # A finaliser gives back in the middle of any call of this or another thread.
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.Lock()
        self._buffers: WeakSet[HostBuffer] = WeakSet()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are in use or free."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least ``nbytes`` bytes.

        Raises:
            OSError: the file system of ``directory`` has no space.
        """
        with self._lock:
            while self._returned:
                insort(self._free, self._returned.popleft(), key=lambda free: free.nbytes)
            place = bisect_left(self._free, nbytes, key=lambda buffer: buffer.nbytes)
            if place < len(self._free):
                return self._free.pop(place)
            if self._free:
                self._free.pop()
        buffer = HostBuffer(self._allocate(nbytes))
        self._buffers.add(buffer)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Returns a buffer whose contents are no longer needed; takes no lock."""
        if not self._closed:
            self._returned.append(buffer)

    def close(self) -> None:
        """Frees the free buffers, and from now on each buffer that is given back."""
        self._closed = True
        self._returned.clear()
        with self._lock:
            self._free.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._directory is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        with tempfile.TemporaryFile(dir=self._directory, prefix="smddp-activations-") as file:
            # Reserves the space now: a full disk is an error here, and SIGBUS at a later write.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
