"""How the ranks of a job agree on a report, and exchange their dumps, over their group's store.

Must not know what a dump holds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Keys after this: contact/R of rank R; of report n n/reason, which the first rank with an error
# sets, n/ended (ranks whose processes have ended), n/leader (the rank that writes the page), n/R
# (the dump of rank R), n/published (how many of these), n/done (the page is written).
_PREFIX = "smddp-report"
# A store that does not answer must not hold up the report.
_ANSWER = timedelta(seconds=3)
_LOOK_SECONDS = 0.05
# How often it is looked whether the ranks that are waited for still take part.
_WITHDRAWN_SECONDS = 0.5
# In place of a rank: rank 0's clock.
CLOCK = -1


def introduce(store: Any, rank: int, contact: str) -> None:
    """Publishes how this rank is asked for a report, over the store's own connection.

    Also how rank 0 is asked for its time, as the rank :data:`CLOCK`. No other thread waits on it
    while a group is made. Another connection to a store whose process has just ended would be tried
    for minutes.
    """
    with contextlib.suppress(RuntimeError):
        dist.PrefixStore(_PREFIX, store).set(f"contact/{rank}", contact)  # type: ignore[attr-defined]


def withdraw(store: Any, rank: int) -> None:
    """Takes back what :func:`introduce` has said: from now on no report waits for this rank."""
    remove(dist.PrefixStore(_PREFIX, store), f"contact/{rank}")  # type: ignore[attr-defined]


def remove(store: Any, key: str) -> None:
    """Removes what this rank has set, unless the store has ended before, often with rank 0."""
    if _answers(store):
        with contextlib.suppress(RuntimeError):
            store.delete_key(key)


class ReportStore:
    """The store of a job's ranks, for one report.

    It uses a connection of its own: others may wait for minutes on the store's, under its lock. A
    store that fails is not asked again: :attr:`works` turns false.
    """

    def __init__(self, store: Any) -> None:
        self.works = _answers(store)
        self._store: Any = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]
        self._store = self._ask("clone")
        self._ask("set_timeout", _ANSWER)

    def _ask(self, method: str, *arguments: Any, otherwise: Any = None) -> Any:
        """What a method of the store returns; ``otherwise`` if it fails, or has failed before."""
        if self.works:
            try:
                return getattr(self._store, method)(*arguments)
            except RuntimeError:
                self.works = False
        return otherwise

    def exists(self, key: str) -> bool:
        """Whether a rank has set the key."""
        return bool(self._ask("check", [key]))

    def get(self, key: str) -> bytes:
        """What is at a key; empty without it."""
        return bytes(self._ask("get", key, otherwise=b"")) if self.exists(key) else b""

    def put(self, key: str, value: str | bytes) -> None:
        """Sets a key for the other ranks."""
        self._ask("set", key, value)

    def claim(self, key: str, value: str) -> str:
        """Sets a key that no other rank has set; what is there then, "" if the store is gone."""
        return str(self._ask("compare_set", key, "", value, otherwise=b"").decode())

    def wait(self, key: str, seconds: float) -> None:
        """Returns once a rank has set the key, or after ``seconds``."""
        until = time.monotonic() + seconds
        while self.works and not self.exists(key) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def contacts(self, ranks: list[int]) -> list[tuple[int, str]]:
        """How those of the given ranks are asked that take part in reports."""
        found = [(rank, self.get(f"contact/{rank}").decode()) for rank in ranks]
        return [(rank, contact) for rank, contact in found if contact]

    def publish(self, number: int, rank: int, dump: dict[str, Any]) -> None:
        """Gives the dump of this rank to the rank that writes the page."""
        self.put(f"{number}/{rank}", zlib.compress(json.dumps(dump).encode(), 1))
        self._ask("add", f"{number}/published", 1)

    def gather(
        self, number: int, ranks: list[int], seconds: float, enough: Callable[[set[int]], bool]
    ) -> dict[int, dict[str, Any]]:
        """The dumps of ``ranks`` that arrive within ``seconds``, of all that still take part.

        ``enough``: whether the missing ranks need no waiting for.
        """
        until, look = time.monotonic() + seconds, 0.0
        missing, count = set(ranks), -1
        while True:
            published = self._ask("add", f"{number}/published", 0, otherwise=len(ranks))
            if published != count or time.monotonic() > look:
                count, look = published, time.monotonic() + _WITHDRAWN_SECONDS
                missing = {
                    rank
                    for rank in missing
                    if not self.exists(f"{number}/{rank}") and self.exists(f"contact/{rank}")
                }
            if not missing or enough(missing) or time.monotonic() > until or not self.works:
                break
            time.sleep(_LOOK_SECONDS)
        packed = {rank: self.get(f"{number}/{rank}") for rank in sorted({*ranks} - missing)}
        return {rank: json.loads(zlib.decompress(dump)) for rank, dump in packed.items() if dump}

    def discard(self, number: int, ranks: list[int]) -> None:
        """Removes the dumps of ``ranks``, which are on the page: a job may fail often."""
        for rank in ranks:
            self._ask("delete_key", f"{number}/{rank}")


def _answers(store: Any) -> bool:
    """False if the process that serves a TCPStore has ended: its clients would try for minutes."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if not host or not port:
        return True
    try:
        socket.create_connection((host, port), _ANSWER.total_seconds()).close()
    except OSError:
        return False
    return True
