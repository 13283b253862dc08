"""The package's exception and its logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("deepspeed_smddp")


class SmddpConfigError(ValueError):
    """A setting is wrong: one sentence with the key, what it held and what it may hold."""
