"""The counters of this process at one moment, and whose they are."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed_smddp.distributed import backend, launchers, memory

if TYPE_CHECKING:
    from deepspeed_smddp._C import MemoryStatistics, StatisticsRow

VERSION = 1  # of the object that as_object() returns
_REFUSED = "refused"  # the row that counts dropped messages; it is no collective


@dataclass(frozen=True)
class Snapshot:
    """What :func:`deepspeed_smddp.statistics` returns, with the time, the rank and the memory.

    ``time`` is in seconds since the epoch.
    """

    time: float
    rank: int
    host: str
    rows: list[StatisticsRow]
    memory: MemoryStatistics
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def collectives(self) -> list[StatisticsRow]:
        """The rows of collectives: smddp's own first, then those that Gloo or NCCL carried out."""
        rows = [row for row in self.rows if row["collective"] != _REFUSED]
        return sorted(rows, key=lambda r: (is_fallback(r), r["collective"], r["path"]))

    @property
    def refused(self) -> int:
        """Messages from outside the job that this rank dropped."""
        return sum(row["calls"] for row in self.rows if row["collective"] == _REFUSED)

    def as_object(self) -> dict[str, Any]:
        """For JSON. Seconds are floats, sizes are bytes; counters run since the last reset."""
        return {
            "version": VERSION,
            "time": round(self.time, 3),
            "rank": self.rank,
            "host": self.host,
            "refused_messages": self.refused,
            "rows": [dict(row) for row in self.collectives],
            "peers": self.peers,
            "memory": dict(self.memory),
        }

    def as_json(self, indent: int | None = None) -> str:
        """The object as text that ends with a newline; without ``indent``, one line."""
        return json.dumps(self.as_object(), indent=indent) + "\n"


def is_fallback(row: StatisticsRow) -> bool:
    """Whether Gloo or NCCL carried the operations out."""
    return row["path"].startswith(backend.FALLBACK_PREFIX)


def take(rank: int) -> Snapshot:
    """The counters of this process now; the extension is loaded.

    Raises:
        ImportError: the extension is missing or was built for another torch.
    """
    return Snapshot(
        time.time(),
        rank,
        launchers.host_name(),
        backend.statistics(),
        memory.statistics(),
        backend.peer_statistics(),
    )
