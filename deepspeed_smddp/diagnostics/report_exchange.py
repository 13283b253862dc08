"""How the ranks of a job ask one another for a report, and exchange their dumps.

Each rank listens at a TCP port, whatever its program does; the dumps go over the store at which the
ranks made their group. Must not know what a dump holds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import selectors
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

TOKEN_BYTES = 16
_SPEAK_SECONDS = 1.0
_BACKLOG = 64
# All keys of report n begin with n/ after this; the first rank with an error sets n/reason.
_PREFIX = "smddp-report"
# A store that does not answer must not hold up the report.
_ANSWER = timedelta(seconds=3)
_LOOK_SECONDS = 0.05
# In place of a rank: rank 0's clock.
CLOCK = -1


class Port:
    """A port of this rank for ranks of the job: they have its token.

    Args:
        towards: a host of the job: the address that reaches it is published.
        kind: ``socket.SOCK_STREAM`` or ``socket.SOCK_DGRAM``.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, towards: str, kind: int) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        address = _own_address(towards)
        self.socket = socket.socket(_family(address), kind)
        self.socket.bind((address, 0))

    def contact(self) -> str:
        """What the other ranks need: token, port, address."""
        host, port = self.socket.getsockname()[:2]
        return f"{self.token.hex()} {port} {host}"


def reach(contact: str, kind: int) -> tuple[socket.socket, tuple[str, int], bytes]:
    """A socket, the address to connect it to, and the token, of a :meth:`Port.contact`."""
    token, port, host = contact.split(" ", 2)
    return socket.socket(_family(host), kind), (host, int(port)), bytes.fromhex(token)


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _own_address(towards: str) -> str:
    """This host's address on the way to a host of the job."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        towards, 9, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class Listener(Port):
    """The TCP port at which this rank is asked for a report, whatever its program does.

    A rank publishes its contact through the store. Who connects and sends the token is one of the
    job; anything else is closed.
    """

    def __init__(self, towards: str) -> None:
        super().__init__(towards, socket.SOCK_STREAM)
        self.socket.listen(_BACKLOG)
        self.socket.setblocking(False)

    def fileno(self) -> int:
        """For ``select``: readable once someone connects."""
        return self.socket.fileno()

    def was_asked(self) -> bool:
        """Whether a rank of the job has connected; serves all that have."""
        asked = False
        while True:
            try:
                visitor, _ = self.socket.accept()
            except OSError:
                return asked
            with visitor:
                visitor.settimeout(_SPEAK_SECONDS)
                asked |= secrets.compare_digest(_received(visitor), self.token)

    def close(self) -> None:
        """Frees the port."""
        self.socket.close()


def _received(visitor: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < TOKEN_BYTES and (part := visitor.recv(TOKEN_BYTES - len(received))):
            received += part
    return received


def ask(contacts: Iterable[tuple[int, str]], seconds: float) -> set[int]:
    """Asks ranks, given with their contacts, for a report. The ranks whose process has ended."""
    ended: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for rank, contact in contacts:
            link, address, token = reach(contact, socket.SOCK_STREAM)
            link.setblocking(False)
            if link.connect_ex(address) == errno.ECONNREFUSED:
                ended.add(rank)
                link.close()
                continue
            selector.register(link, selectors.EVENT_WRITE, (rank, token))
        until = time.monotonic() + seconds
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link = key.fileobj  # type: ignore[assignment]
                rank, token = key.data
                try:
                    link.send(token)
                except ConnectionRefusedError:
                    ended.add(rank)
                except OSError:
                    pass  # it does not answer: its dump will be missing
                selector.unregister(link)
                link.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return ended


def introduce(store: Any, rank: int, contact: str) -> None:
    """Publishes how this rank is asked for a report, over the store's own connection.

    Also how rank 0 is asked for its time, as the rank :data:`CLOCK`.

    No other thread waits on it while a group is made. Another connection to a store whose process
    has just ended would be tried for minutes.
    """
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):
        dist.PrefixStore(_PREFIX, store).set(f"contact/{rank}", contact)  # type: ignore[attr-defined]


class ReportStore:
    """The exchange of one rank, for one report.

    It uses a connection of its own: others may wait for minutes on the store's, under its lock. A
    store that fails is not asked again: :attr:`works` turns false.
    """

    def __init__(self, store: Any) -> None:
        import torch.distributed as dist

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

    def contacts(self, ranks: list[int]) -> list[tuple[int, str]]:
        """How the given ranks are asked, as far as they have said it."""
        keys = [f"contact/{rank}" for rank in ranks]
        found = self._ask("multi_get", keys, otherwise=[]) if keys else []
        return [(rank, contact.decode()) for rank, contact in zip(ranks, found, strict=False)]

    def clock(self) -> str:
        """How rank 0 is asked for its time; "" if it can't be."""
        if not self._exists(f"contact/{CLOCK}"):
            return ""
        return "".join(contact for _, contact in self.contacts([CLOCK]))

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
        key = f"{number}/ended"
        if not self._exists(key):
            return set()
        return set(json.loads(self._ask("get", key, otherwise=b"[]")))

    def publish(self, number: int, rank: int, dump: dict[str, Any]) -> None:
        """Gives the dump of this rank to the rank that writes the page."""
        self._ask("set", f"{number}/{rank}", zlib.compress(json.dumps(dump).encode(), 1))
        self._ask("add", f"{number}/published", 1)

    def leads(self, number: int, rank: int, patience: float) -> bool | None:
        """Whether this rank writes the page: the first that claims it, after ``patience`` seconds.

        None if the store is gone.
        """
        key = f"{number}/leader"
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if self._exists(key) or not self.works:
                break
            time.sleep(_LOOK_SECONDS)
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
        dumps = {}
        for rank in sorted(set(ranks) - missing):
            packed = self._ask("get", f"{number}/{rank}", otherwise=b"")
            if packed:
                dumps[rank] = json.loads(zlib.decompress(packed))
        return dumps

    def _exists(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def finish(self, number: int) -> None:
        """The page is written."""
        self._ask("set", f"{number}/done", "1")

    def await_finish(self, number: int, seconds: float) -> None:
        """Returns once the page is written, or after ``seconds``."""
        until = time.monotonic() + seconds
        while self.works and time.monotonic() < until:
            if self.has_ended(number):
                return
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
