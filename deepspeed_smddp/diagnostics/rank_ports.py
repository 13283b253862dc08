"""The ports at which ranks of a job ask one another: for a report over TCP, for the time over UDP.

Rank 0 tells its time with the sums of NTP. The rank that asks notes its own time before and after,
t0 and t1. With the answer T, its clock is ahead by (t0 + t1) / 2 - T, off by at most (t1 - t0) / 2,
wherever in between the answer was made (RFC 5905, section 8). The shortest of several exchanges is
the surest.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_TOKEN_BYTES = 16
_SPEAK_SECONDS = 1.0
_BACKLOG = 64
_QUESTION = struct.Struct(f"<{_TOKEN_BYTES}sQ")  # the token, the number of the question
_ANSWER = struct.Struct("<Qq")  # the number, nanoseconds since 1970
ROUND_TRIPS = 32
_ANSWER_SECONDS = 0.2
_ALL_SECONDS = 1.0


class Port:
    """A port of this rank for ranks of the job: they have its token.

    The address that reaches ``towards``, a host of the job, is published.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, towards: str, kind: int) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        address = _own_address(towards)
        self.socket = socket.socket(_family(address), kind)
        self.socket.bind((address, 0))

    def contact(self) -> str:
        """What the other ranks need: token, port, address."""
        host, port = self.socket.getsockname()[:2]
        return f"{self.token.hex()} {port} {host}"


def _reach(contact: str, kind: int) -> tuple[socket.socket, tuple[str, int], bytes]:
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
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class Listener(Port):
    """The TCP port at which this rank is asked for a report, whatever its program does.

    Who connects and sends the token is a rank of the job; anything else is closed.
    """

    def __init__(self, towards: str) -> None:
        super().__init__(towards, socket.SOCK_STREAM)
        # The kernel keeps a connection back that says nothing, for half a minute.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 30)
        self.socket.listen(_BACKLOG)
        self.socket.setblocking(False)

    def was_asked(self) -> bool:
        """Whether a rank of the job has connected; serves all that have."""
        asked = False
        while True:
            try:
                visitor, _ = self.socket.accept()
            except OSError:
                return asked
            received = b""
            with visitor, contextlib.suppress(OSError):
                visitor.settimeout(_SPEAK_SECONDS)
                while len(received) < _TOKEN_BYTES and (part := visitor.recv(_TOKEN_BYTES)):
                    received += part
            asked |= secrets.compare_digest(received, self.token)


def ask(contacts: Iterable[tuple[int, str]], seconds: float) -> set[int]:
    """Asks ranks, given with their contacts, for a report. The ranks whose process has ended."""
    ended: set[int] = set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as links:
        for rank, contact in contacts:
            link, address, token = _reach(contact, socket.SOCK_STREAM)
            links.enter_context(link).setblocking(False)
            if link.connect_ex(address) == errno.ECONNREFUSED:
                ended.add(rank)
            else:
                selector.register(link, selectors.EVENT_WRITE, (link, rank, token))
        until = time.monotonic() + seconds
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link, rank, token = key.data
                try:
                    link.send(token)
                except ConnectionRefusedError:
                    ended.add(rank)
                except OSError:
                    pass  # it does not answer: its dump will be missing
                selector.unregister(link)
    return ended


class ClockServer(threading.Thread):
    """Tells the time to those that have the token of its port. It ends with :meth:`close`.

    ``now`` is in nanoseconds since 1970. Arguments and errors are otherwise those of :class:`Port`.
    """

    def __init__(self, towards: str, now: Callable[[], int] = time.time_ns) -> None:
        super().__init__(name="smddp-clock", daemon=True)
        self._now = now
        self._port = Port(towards, socket.SOCK_DGRAM)
        self.contact = self._port.contact
        self._ended = False

    def run(self) -> None:
        """Answers; what is not a question of the job gets none."""
        link = self._port.socket
        while not self._ended:
            with contextlib.suppress(OSError):
                question, sender = link.recvfrom(_QUESTION.size + 1)
                if len(question) == _QUESTION.size:
                    token, number = _QUESTION.unpack(question)
                    if secrets.compare_digest(token, self._port.token):
                        link.sendto(_ANSWER.pack(number, self._now()), sender)

    def close(self) -> None:
        """Ends the thread and frees the port."""
        self._ended = True
        link = self._port.socket
        if self.is_alive():
            with contextlib.suppress(OSError):
                link.sendto(b"", link.getsockname())
            self.join(timeout=1)
        link.close()


@dataclass(frozen=True)
class Clock:
    """How far the clock of this rank's host is ahead of rank 0's, in seconds, when it was asked.

    Off by ``uncertainty`` at most, half of the shortest of ``round_trips`` exchanges.
    """

    offset: float
    uncertainty: float
    round_trips: int = 0


def measure(contact: str) -> Clock | None:
    """How far this clock is ahead of that of a rank, given with its contact.

    None if the rank does not answer. Takes a second at most.
    """
    exchanges: list[tuple[int, int]] = []  # the length of each, the offset; in ns
    until = time.monotonic() + _ALL_SECONDS
    link, address, token = _reach(contact, socket.SOCK_DGRAM)
    with link, contextlib.suppress(OSError):
        link.settimeout(_ANSWER_SECONDS)
        link.connect(address)
        for number in range(ROUND_TRIPS):
            if time.monotonic() > until:
                break
            before = time.time_ns()
            link.send(_QUESTION.pack(token, number))
            answer = _received(link, number)
            after = time.time_ns()
            # One during which the clock was set back does not count.
            if answer is not None and after >= before:
                exchanges.append((after - before, (before + after) // 2 - answer))
    if not exchanges:
        return None
    length, offset = min(exchanges)
    return Clock(offset * 1e-9, length * 0.5e-9, len(exchanges))


def _received(link: socket.socket, number: int) -> int | None:
    """The answer to a question, or None; late answers to earlier ones are dropped."""
    while True:
        try:
            answer = link.recv(_ANSWER.size + 1)
        except TimeoutError:
            return None
        if len(answer) == _ANSWER.size:
            of, told = _ANSWER.unpack(answer)
            if of == number:
                return int(told)
