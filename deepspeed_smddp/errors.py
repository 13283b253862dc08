"""The package's exception and its logger."""

from __future__ import annotations

import logging

logger = logging.getLogger("deepspeed_smddp")


class SmddpConfigError(ValueError):
    """A setting is wrong; one sentence names the key, the value it holds and the values allowed."""
