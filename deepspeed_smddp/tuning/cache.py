"""Stores measured network models, one file per topology, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from deepspeed_smddp.tuning.choice import NetworkModel, Point

# Variables that change the network, or how collectives use it.
_VARIABLES = (
    "SMDDP_LIBFABRIC",
    "SMDDP_FABRIC_PROVIDER",
    "SMDDP_FABRIC_INTERFACE",
    "SMDDP_FABRIC_TRANSFER",
    "SMDDP_FABRIC_MESSAGES",
    "SMDDP_FABRIC_HMEM",
    "SMDDP_FABRIC_CURVE",
    "SMDDP_ALGORITHM",
    "SMDDP_SINGLE_COPY",
    "SMDDP_SHARED_ALLOCATOR",
    "OMP_NUM_THREADS",
)


# Bounds of what a model may hold. The start-up measures one of its sizes again: a size that no run
# has measured would take the job's memory.
_LARGEST_SIZE = 64 << 20  # bytes
_LONGEST_SECONDS = 3600.0
_MOST_POINTS = 64


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
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def store(name: str, curve: NetworkModel) -> None:
    """Stores a network model. If the directory can't be written, the next job measures again."""
    _write(name, asdict(curve))


def load_routes(name: str) -> list[tuple[int, float, float]] | None:
    """The measured points of a route: bytes, seconds over smddp and over the fallback; or None."""
    try:
        found = json.loads((directory() / f"routes-{name}.json").read_text(encoding="utf-8"))
        points = [(_point(p[0], p[1]), _point(p[0], p[2])) for p in found]
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError):
        return None
    sizes = [ours.size for ours, _ in points]
    if not 2 <= len(points) <= _MOST_POINTS or sizes != sorted(set(sizes)):
        return None
    return [(ours.size, ours.seconds, theirs.seconds) for ours, theirs in points]


def store_routes(name: str, points: Sequence[tuple[int, float, float]]) -> None:
    """Stores the measured points of a route, as :func:`store` does."""
    _write(f"routes-{name}", points)


def _write(name: str, value: Any) -> None:
    part = None
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=directory(), suffix=".part", delete=False, encoding="utf-8"
        ) as file:
            part = Path(file.name)
            json.dump(value, file)
        os.replace(part, directory() / f"{name}.json")
    except (OSError, RuntimeError):
        if part is not None:  # on a full disk
            part.unlink(missing_ok=True)


def from_json(found: dict[str, list[dict[str, float]]]) -> NetworkModel:
    """The inverse of ``dataclasses.asdict``.

    Raises:
        ValueError, KeyError, TypeError: it is not the JSON of a network model that was measured.
    """
    return NetworkModel(_points(found, "allgather"), _points(found, "reduce_scatter"))


def _points(found: dict[str, list[dict[str, float]]], key: str) -> tuple[Point, ...]:
    given = found[key]
    if not 2 <= len(given) <= _MOST_POINTS:
        raise ValueError(f"{key} is not a measured curve")
    read = tuple(_point(p["size"], p["seconds"]) for p in given)
    if any(a.size >= b.size for a, b in pairwise(read)):
        raise ValueError(f"the sizes of {key} do not rise")
    return read


def _point(size: float, seconds: float) -> Point:
    if not isinstance(size, int) or not 0 < size <= _LARGEST_SIZE:
        raise ValueError(f"a size is {size}; it may be 1 to {_LARGEST_SIZE} bytes")
    if not math.isfinite(seconds) or not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(f"a time is {seconds} s")
    return Point(size, float(seconds))
