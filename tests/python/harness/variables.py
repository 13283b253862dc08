"""Variables that give settings to a test's ranks."""

from __future__ import annotations

import json
import os


def debug(**keys: object) -> dict[str, str]:
    """``SMDDP_DEBUG`` with these keys beside those of this process."""
    pairs = [os.environ.get("SMDDP_DEBUG", ""), *(f"{key}={value}" for key, value in keys.items())]
    return {"SMDDP_DEBUG": ",".join(filter(None, pairs))}


def section(**keys: object) -> dict[str, str]:
    """The variable by which a rank of a :class:`World` gets a section before its group is made."""
    return {"TEST_SECTION": json.dumps(keys)}
