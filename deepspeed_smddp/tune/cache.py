"""Stores measured network models, one file per topology, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepspeed_smddp.tune.choice import NetworkModel, Point

# Variables that change the network, or how collectives use it.
_VARIABLES = (
    "SMDDP_LIBFABRIC",
    "SMDDP_FABRIC_PROVIDER",
    "SMDDP_FABRIC_INTERFACE",
    "SMDDP_FABRIC_TRANSFER",
    "SMDDP_FABRIC_HMEM",
    "SMDDP_FABRIC_CURVE",
    "SMDDP_ALGORITHM",
    "SMDDP_SINGLE_COPY",
    "SMDDP_SHARED_ALLOCATOR",
    "OMP_NUM_THREADS",
)


def directory() -> Path:
    """The directory of the cache, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "deepspeed_smddp" / "tune"


def topology(version: str, hosts: Sequence[str]) -> str:
    """The name of a topology: package version, hosts by rank, and settings of the network."""
    settings = [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES]
    text = "\n".join([version, *hosts, *settings])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str) -> NetworkModel | None:
    """The network model of a topology, or None if there is none that can be read."""
    try:
        found = json.loads((directory() / f"{name}.json").read_text(encoding="utf-8"))
        return from_json(found)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None


def store(name: str, curve: NetworkModel) -> None:
    """Stores a network model. If the directory can't be written, the next job measures again."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=directory(), suffix=".part", delete=False, encoding="utf-8"
        ) as file:
            json.dump(asdict(curve), file)
        os.replace(file.name, directory() / f"{name}.json")
    except (OSError, RuntimeError):
        return


def from_json(found: dict[str, list[dict[str, float]]]) -> NetworkModel:
    """The inverse of ``dataclasses.asdict``.

    Raises:
        ValueError, KeyError, TypeError: it is not a network model's JSON.
    """

    def points(key: str) -> tuple[Point, ...]:
        read = tuple(Point(int(p["size"]), float(p["seconds"])) for p in found[key])
        if len(read) < 2 or any(p.size <= 0 or p.seconds <= 0 for p in read):
            raise ValueError(f"{key} is not a measured curve")
        return read

    return NetworkModel(points("allgather"), points("reduce_scatter"))
