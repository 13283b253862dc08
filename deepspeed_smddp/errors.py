"""The package's exception, its logger, and warnings that are given once."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("deepspeed_smddp")
_warned: set[str] = set()


class SmddpConfigError(ValueError):
    """A setting is wrong; one sentence names the key, the value it holds and the values allowed."""


def warn_once(key: str, message: str) -> None:
    """Logs a warning on rank 0, at the first call with this key."""
    if key not in _warned and os.environ.get("RANK", "0") == "0":
        logger.warning(message)
    _warned.add(key)
