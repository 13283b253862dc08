"""Copies between an activation and its host buffer; on devices with streams, beside computation.

Stream calls are those of ``torch.accelerator``. They have not been run on hardware. The tests run
their order on a substitute that executes each copy as late as the order permits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Copy(Protocol):
    """A copy that has been started."""

    def wait(self) -> None:
        """Orders the caller's later computation after the copy; does not block the host."""


class Copies(Protocol):
    """Starts copies. ``after``: the latest copy that uses the same host buffer."""

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        """Copies to the host, after the caller's computation so far."""

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        """Copies from the host to memory that the caller's stream allocated."""


class _Done:
    def wait(self) -> None:
        pass


class Immediate:
    """Host to host: each copy is complete when the call returns."""

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        """Copies now."""
        host.copy_(source)
        return _Done()

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        """Copies now."""
        target.copy_(host)
        return _Done()


class _OnStream:
    def __init__(self, event: Any, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self.event)


class Streams:
    """One stream for each direction, beside the caller's, so that both copy engines can work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._back = torch.Stream(device)

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        """Copies on the stream to the host, after the work queued on the caller's stream."""
        return self._follow(self._out, host, source, after)

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        """Copies on the other stream, also after the work queued on the caller's stream.

        The target's memory may have belonged to another tensor that this work uses.
        """
        return self._follow(self._back, target, host, after)

    def _follow(
        self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor, after: Copy | None
    ) -> Copy:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if isinstance(after, _OnStream):
            stream.wait_event(after.event)
        with stream:
            target.copy_(source, non_blocking=True)
        return _OnStream(stream.record_event(), self._device)


def copies_for(device: torch.device) -> Copies:
    """Streams for tensors on an accelerator, plain copies for tensors on the host."""
    return Immediate() if device.type == "cpu" else Streams(device)
