"""How the ranks of a job agree on a report, and exchange their dumps, over their group's store.

Must not know what a dump holds.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# All keys of report n begin with n/ after this; the first rank with an error sets n/reason.
_PREFIX = "smddp-report"
# A store that does not answer must not hold up the report.
_ANSWER = timedelta(seconds=3)
_LOOK_SECONDS = 0.05
# In place of a rank: rank 0's clock.
CLOCK = -1


def introduce(store: Any, rank: int, contact: str) -> None:
    """Publishes how this rank is asked for a report, over the store's own connection.

    Also how rank 0 is asked for its time, as the rank :data:`CLOCK`.

    No other thread waits on it while a group is made. Another connection to a store whose process
    has just ended would be tried for minutes.
    """
    with contextlib.suppress(RuntimeError):
        dist.PrefixStore(_PREFIX, store).set(f"contact/{rank}", contact)  # type: ignore[attr-defined]


class ReportStore:
    """The exchange of one rank, for one report.

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

    def _get(self, key: str, absent: bytes) -> bytes:
        """What is at a key, without waiting for it."""
        there = self._ask("check", [key])
        return bytes(self._ask("get", key, otherwise=absent)) if there else absent

    def contacts(self, ranks: list[int]) -> list[tuple[int, str]]:
        """How the given ranks are asked, as far as they have said it."""
        keys = [f"contact/{rank}" for rank in ranks]
        found = self._ask("multi_get", keys, otherwise=[]) if keys else []
        return [(rank, contact.decode()) for rank, contact in zip(ranks, found, strict=False)]

    def clock(self) -> str:
        """How rank 0 is asked for its time; "" if it can't be."""
        return self._get(f"contact/{CLOCK}", b"").decode()

    def latest(self, number: int) -> int:
        """The latest report that has begun, or ``number`` if no later one has."""
        while self._exists(f"{number + 1}/reason"):
            number += 1
        return number

    def has_begun(self, number: int) -> bool:
        """Whether a rank has asked for report ``number``."""
        return self._exists(f"{number}/reason")

    def has_ended(self, number: int) -> bool:
        """Whether the page of report ``number`` is written."""
        return self._exists(f"{number}/done")

    def begin(self, number: int, reason: str) -> tuple[str, bool]:
        """Why report ``number`` is made, and whether this rank is the first to say so."""
        mine = f"{secrets.token_hex(8)} {reason}"
        first = self._ask("compare_set", f"{number}/reason", "", mine, otherwise=b"").decode()
        return (first.partition(" ")[2], first == mine) if first else (reason, False)

    def note_ended(self, number: int, ended: set[int]) -> None:
        """Tells which ranks' processes have ended."""
        self._ask("set", f"{number}/ended", json.dumps(sorted(ended)))

    def ended(self, number: int) -> set[int]:
        """The ranks whose processes have ended, as far as a rank has said so."""
        return set(json.loads(self._get(f"{number}/ended", b"[]")))

    def publish(self, number: int, rank: int, dump: dict[str, Any]) -> None:
        """Gives the dump of this rank to the rank that writes the page."""
        self._ask("set", f"{number}/{rank}", zlib.compress(json.dumps(dump).encode(), 1))
        self._ask("add", f"{number}/published", 1)

    def leads(self, number: int, rank: int, patience: float) -> bool | None:
        """Whether this rank writes the page: the first that claims it, after ``patience`` seconds.

        None if the store is gone.
        """
        key = f"{number}/leader"
        self._await(key, patience)
        claimed = self._ask("compare_set", key, "", str(rank))
        return None if claimed is None else int(claimed) == rank

    def gather(
        self, number: int, ranks: list[int], seconds: float, enough: Callable[[set[int]], bool]
    ) -> dict[int, dict[str, Any]]:
        """The dumps of ``ranks`` that arrive within ``seconds``.

        Args:
            enough: whether the ranks that are still missing, given as a set, need no waiting for.
        """
        until = time.monotonic() + seconds
        missing, count = set(ranks), -1
        while True:
            published = self._ask("add", f"{number}/published", 0, otherwise=len(ranks))
            if published != count:
                count = published
                missing = {rank for rank in missing if not self._exists(f"{number}/{rank}")}
            if not missing or enough(missing) or time.monotonic() > until or not self.works:
                break
            time.sleep(_LOOK_SECONDS)
        packed = {rank: self._get(f"{number}/{rank}", b"") for rank in sorted({*ranks} - missing)}
        return {rank: json.loads(zlib.decompress(dump)) for rank, dump in packed.items() if dump}

    def _exists(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def finish(self, number: int) -> None:
        """The page is written."""
        self._ask("set", f"{number}/done", "1")

    def await_finish(self, number: int, seconds: float) -> None:
        """Returns once the page is written, or after ``seconds``."""
        self._await(f"{number}/done", seconds)

    def _await(self, key: str, seconds: float) -> None:
        """Returns once a rank has set the key, or after ``seconds``."""
        until = time.monotonic() + seconds
        while self.works and not self._exists(key) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)


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
