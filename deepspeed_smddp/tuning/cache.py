"""What was measured of a network: one file per topology in the user's cache directory.

Hosts may have different directories: the file of a group's first rank counts for all its ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, Field, TypeAdapter

from deepspeed_smddp.config import settings
from deepspeed_smddp.distributed import launchers
from deepspeed_smddp.tuning.choice import MOST_POINTS, NetworkModel, Seconds, rising
from deepspeed_smddp.version import __version__
from deepspeed_smddp.whole_file import replace

_BLOB = 4096  # bytes

# Variables that change the network, or how collectives use it.
_VARIABLES = (
    "SMDDP_LIBFABRIC",
    "SMDDP_FABRIC_PROVIDER",
    "SMDDP_FABRIC_INTERFACE",
    "SMDDP_SHARED_ALLOCATOR",
    "SMDDP_DEBUG",
    "OMP_NUM_THREADS",
)

_LARGEST = 1 << 30  # bytes that a route is measured with
# Bytes, seconds over smddp and over the fallback.
RoutePoint = tuple[Annotated[int, Field(gt=0, le=_LARGEST)], Seconds, Seconds]


@dataclass(frozen=True)
class MeasuredRoutes:
    """What one collective took on a group, in ascending order of size; ``where``: for people."""

    collective: str
    device: Annotated[str, Field(pattern="^(cpu|cuda)$")]
    where: str
    points: Annotated[
        list[RoutePoint],
        Field(min_length=2, max_length=MOST_POINTS),
        AfterValidator(lambda points: rising(points, [point[0] for point in points])),
    ]


NETWORK: TypeAdapter[NetworkModel] = TypeAdapter(NetworkModel)
ROUTES: TypeAdapter[MeasuredRoutes] = TypeAdapter(MeasuredRoutes)
_Kind = TypeVar("_Kind")


def directory() -> Path:
    """The directory of the cache, below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "deepspeed_smddp" / "tune"


def topology(version: str, hosts: Sequence[str]) -> str:
    """The name of a topology: package version, hosts by rank, and settings of the network."""
    variables = [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES]
    coding = settings.current().section.coding
    text = "\n".join([version, *hosts, *variables, coding])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall(
    group: Any,
    device: torch.device,
    kind: TypeAdapter[_Kind],
    holds: Callable[[_Kind], bool],
    measure: Callable[[Sequence[str]], _Kind],
    *what: str,
) -> tuple[_Kind, str]:
    """What is known of a group's network, and whether it was ``measured`` or ``recalled``.

    Collective, with equal results on all ranks, and so are ``holds``, whether a stored value still
    does, and ``measure``, of the ranks' hosts. Groups with the same hosts by rank share it;
    ``group`` is torch's, or the ``_C.ProcessGroupSMDDP`` in it. ``what``: further words that the
    value belongs to.
    """
    gpu = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    by_rank = hosts(group)
    name = topology(" ".join([__version__, *what, *gpu]), by_rank)
    known = _shared(load(name, kind), kind, group)
    if known is not None and holds(known):
        return known, "recalled"
    found = measure(by_rank)
    if group.rank() == 0:
        store(name, found, kind)
    return found, "measured"


def load(name: str, kind: TypeAdapter[_Kind]) -> _Kind | None:
    """What is stored under a name, or None if there is nothing that can be read."""
    try:
        return kind.validate_json((directory() / f"{name}.json").read_bytes(), strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def all_of(kind: TypeAdapter[_Kind]) -> Iterator[tuple[float, _Kind]]:
    """Everything of a kind that this user's jobs have stored, with the time of each."""
    for path in sorted(directory().glob("*.json")):
        if (known := load(path.stem, kind)) is not None:
            yield path.stat().st_mtime, known


def store(name: str, value: _Kind, kind: TypeAdapter[_Kind]) -> None:
    """Stores it. If the directory can't be written, the next job measures again."""
    with contextlib.suppress(OSError, RuntimeError):
        directory().mkdir(parents=True, exist_ok=True)
        replace(directory() / f"{name}.json", kind.dump_json(value).decode())


def hosts(group: Any) -> list[str]:
    """The identity of each rank's host, by rank; collective."""
    name = launchers.host_name()
    own = torch.frombuffer(bytearray(hashlib.sha256(name.encode()).digest()), dtype=torch.uint8)
    gathered = torch.empty(own.numel() * group.size(), dtype=torch.uint8)
    group._allgather_base(gathered, own).wait()
    return [row.numpy().tobytes().hex() for row in gathered.chunk(group.size())]


def _shared(value: _Kind | None, kind: TypeAdapter[_Kind], group: Any) -> _Kind | None:
    """The value of the first rank, on all ranks; None if there is none or it is too long."""
    text = b"" if value is None else kind.dump_json(value)
    own = torch.zeros(_BLOB, dtype=torch.uint8)
    if 0 < len(text) <= _BLOB:
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = torch.empty(_BLOB * group.size(), dtype=torch.uint8)
    group._allgather_base(gathered, own).wait()
    found = gathered[:_BLOB].numpy().tobytes().rstrip(b"\0")
    return kind.validate_json(found, strict=True) if found else None
