"""Ctrl-C, or a launcher that ends the job: the sweep stops after the current turn."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within ``with``, the first signal is kept; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._keep) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()
