"""Copies between an activation and its host buffer, beside the computation where there are streams.

Stream calls are those of ``torch.accelerator``. They have not been run on hardware; the tests run
the order that they ask for on a stand-in that carries each copy out as late as it may.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """What the caller computes from now on sees the copy done; does not block the host."""


class Copies(Protocol):
    """How bytes are moved. ``after``: the latest copy that uses the same host buffer."""

    def out(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        """Copies to the host what the caller has computed so far."""

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        """Copies from the host into memory that the caller's stream allocated."""


class _Done:
    def wait(self) -> None:
        pass


class Immediate:
    """Host to host: each copy is done when the call returns."""

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
        """Follows, on its stream, what the caller's stream has been given so far."""
        return self._follow(self._out, host, source, after)

    def back(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        """Likewise: the target's memory may have been another tensor's a moment ago."""
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
    """Streams on an accelerator, plain copies for tensors that lie on the host."""
    return Immediate() if device.type == "cpu" else Streams(device)
