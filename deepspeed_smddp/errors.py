"""The package's exception, its logger, and warnings that are given once."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("deepspeed_smddp")
_warned: set[str] = set()
OR_ALL = " (or 0 for all of them)"  # ranks: the end of a sentence


class SmddpConfigError(ValueError):
    """A setting is wrong; one sentence names the key, the value it holds and the values allowed."""


class CommandError(RuntimeError):
    """Why a command ends: one sentence. ``status`` is the exit status of ``smddp``."""

    status = 1


def no_divisor(key: str, degree: int, ranks: int, what: str, more: str = "") -> SmddpConfigError:
    """The error of a degree that does not divide the number of ``ranks``, which are ``what``."""
    divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
    return SmddpConfigError(
        f"{key} is {degree}, but may hold a divisor of the {ranks} {what}: {divisors}{more}"
    )


def warn_once(key: str, message: str) -> None:
    """Logs a warning on rank 0, at the first call with this key."""
    if key not in _warned and os.environ.get("RANK", "0") == "0":
        logger.warning(message)
    _warned.add(key)
