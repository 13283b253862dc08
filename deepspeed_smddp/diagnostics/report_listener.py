"""How one rank asks all others for a report: each listens at a TCP port, whatever its program does.

A rank publishes its address and a token of its own through the store. Who connects and sends the
token is one of the job; anything else is closed. Must not know what a report is.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections.abc import Iterable

TOKEN_BYTES = 16
_SPEAK_SECONDS = 1.0
_BACKLOG = 64


class Listener:
    """The port of this rank.

    ``towards`` is a host of the job: the address that reaches it is published.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, towards: str) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        address = own_address(towards)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For ``select``: readable once someone connects."""
        return self._socket.fileno()

    def contact(self) -> str:
        """What the other ranks need: token, port, address."""
        host, port = self._socket.getsockname()[:2]
        return f"{self._token.hex()} {port} {host}"

    def was_asked(self) -> bool:
        """Whether a rank of the job has connected; serves all that have."""
        asked = False
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                return asked
            with visitor:
                visitor.settimeout(_SPEAK_SECONDS)
                asked |= secrets.compare_digest(_received(visitor), self._token)

    def close(self) -> None:
        """Frees the port."""
        self._socket.close()


def ask(contacts: Iterable[tuple[int, str]], seconds: float) -> set[int]:
    """Asks ranks, given with their contacts, for a report. The ranks whose process has ended."""
    ended: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for rank, contact in contacts:
            token, port, host = contact.split(" ", 2)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            link = socket.socket(family, socket.SOCK_STREAM)
            link.setblocking(False)
            if link.connect_ex((host, int(port))) == errno.ECONNREFUSED:
                ended.add(rank)
                link.close()
                continue
            selector.register(link, selectors.EVENT_WRITE, (rank, bytes.fromhex(token)))
        until = time.monotonic() + seconds
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link = key.fileobj  # type: ignore[assignment]
                rank, secret = key.data
                try:
                    link.send(secret)
                except ConnectionRefusedError:
                    ended.add(rank)
                except OSError:
                    pass  # it does not answer: its dump will be missing
                selector.unregister(link)
                link.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return ended


def _received(visitor: socket.socket) -> bytes:
    received = b""
    try:
        while len(received) < TOKEN_BYTES and (part := visitor.recv(TOKEN_BYTES - len(received))):
            received += part
    except OSError:
        pass
    return received


def own_address(towards: str) -> str:
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
