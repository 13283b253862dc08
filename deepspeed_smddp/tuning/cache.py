"""Stores what was measured of a network, one file per topology, in the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from deepspeed_smddp.tuning.choice import MOST_POINTS, NetworkModel, Seconds, Size, rising
from deepspeed_smddp.whole_file import replace

# Variables that change the network, or how collectives use it.
_VARIABLES = (
    "SMDDP_LIBFABRIC",
    "SMDDP_FABRIC_PROVIDER",
    "SMDDP_FABRIC_INTERFACE",
    "SMDDP_SHARED_ALLOCATOR",
    "SMDDP_DEBUG",
    "OMP_NUM_THREADS",
)

RoutePoint = tuple[Size, Seconds, Seconds]  # bytes, seconds over smddp and over the fallback
NETWORK: TypeAdapter[NetworkModel] = TypeAdapter(NetworkModel)
ROUTES: TypeAdapter[list[RoutePoint]] = TypeAdapter(
    Annotated[
        list[RoutePoint],
        Field(min_length=2, max_length=MOST_POINTS),
        AfterValidator(lambda points: rising(points, [point[0] for point in points])),
    ]
)
_Kind = TypeVar("_Kind")


def directory() -> Path:
    """The directory of the cache, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "deepspeed_smddp" / "tune"


def topology(version: str, hosts: Sequence[str]) -> str:
    """The name of a topology: package version, hosts by rank, and settings of the network."""
    settings = [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES]
    text = "\n".join([version, *hosts, *settings])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str, kind: TypeAdapter[_Kind]) -> _Kind | None:
    """What is stored under a name, or None if there is nothing that can be read."""
    try:
        return kind.validate_json((directory() / f"{name}.json").read_bytes(), strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def store(name: str, value: _Kind, kind: TypeAdapter[_Kind]) -> None:
    """Stores it. If the directory can't be written, the next job measures again."""
    with contextlib.suppress(OSError, RuntimeError):
        directory().mkdir(parents=True, exist_ok=True)
        replace(directory() / f"{name}.json", kind.dump_json(value).decode())
