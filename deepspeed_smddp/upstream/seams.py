"""Extension points of DeepSpeed in whose place this package wraps functions; used where they exist.

No version that this package knows has them: ``docs/dev/upstream.md`` proposes them. One with
another signature counts as absent.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seam:
    """A function, by its path from an imported package, and arguments that it has to have."""

    package: str
    path: str
    arguments: tuple[str, ...]


SEAMS: dict[str, Seam] = {
    "comm_backend": Seam("deepspeed", "comm.backend_of_config", ("config",)),
    "gather": Seam("deepspeed", "zero.set_parameter_gatherer", ("gatherer",)),
}


def find(name: str) -> Callable[..., Any] | None:
    """The function of :data:`SEAMS`, if the library has it with these arguments."""
    seam = SEAMS[name]
    found: Any = sys.modules.get(seam.package)
    for part in seam.path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        return None
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return None
    return found if all(argument in parameters for argument in seam.arguments) else None
