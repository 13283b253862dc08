"""How far the clock of a host is ahead of rank 0's: asked over UDP, with the sums of NTP.

Rank 0 answers with its time, in a thread that only sleeps otherwise. Another rank notes its own
time before and after, t0 and t1. With the answer T, its clock is ahead by (t0 + t1) / 2 - T, off by
at most (t1 - t0) / 2, wherever in between the answer was made (RFC 5905, section 8). The shortest
of several exchanges is the surest.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_smddp.diagnostics.report_listener import own_address

_TOKEN_BYTES = 16
_QUESTION = struct.Struct(f"<{_TOKEN_BYTES}sQ")  # the token, the number of the question
_ANSWER = struct.Struct("<Qq")  # the number, nanoseconds since 1970

ROUND_TRIPS = 32
_ANSWER_SECONDS = 0.2
_ALL_SECONDS = 1.0


class ClockServer(threading.Thread):
    """Tells the time to those that have the token. It ends with :meth:`close`.

    Args:
        towards: a host of the job: the address that reaches it is published.
        now: the time in nanoseconds since 1970.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, towards: str, now: Callable[[], int] = time.time_ns) -> None:
        super().__init__(name="smddp-clock", daemon=True)
        self._now = now
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        address = own_address(towards)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._ended = False

    def contact(self) -> str:
        """What the other ranks need: token, port, address."""
        host, port = self._socket.getsockname()[:2]
        return f"{self._token.hex()} {port} {host}"

    def run(self) -> None:
        """Answers; what is not a question of the job gets none."""
        while True:
            try:
                question, sender = self._socket.recvfrom(_QUESTION.size + 1)
            except OSError:
                continue
            if self._ended:
                return
            if len(question) != _QUESTION.size:
                continue
            token, number = _QUESTION.unpack(question)
            if secrets.compare_digest(token, self._token):
                with contextlib.suppress(OSError):
                    self._socket.sendto(_ANSWER.pack(number, self._now()), sender)

    def close(self) -> None:
        """Ends the thread and frees the port."""
        self._ended = True
        if self.is_alive():
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self._socket.getsockname())
            self.join(timeout=1)
        self._socket.close()


def measure(contact: str) -> dict[str, Any] | None:
    """How far this clock is ahead of that of a rank, given with its contact.

    Returns:
        ``offset`` and ``uncertainty`` in seconds, and the number of ``round_trips``; None if the
        rank does not answer. Takes a second at most.
    """
    token, port, host = contact.split(" ", 2)
    best: tuple[int, int] | None = None  # the length of the exchange, the offset; in ns
    count = 0
    until = time.monotonic() + _ALL_SECONDS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        link.settimeout(_ANSWER_SECONDS)
        with contextlib.suppress(OSError):
            link.connect((host, int(port)))
            for number in range(ROUND_TRIPS):
                if time.monotonic() > until:
                    break
                question = _QUESTION.pack(bytes.fromhex(token), number)
                before = time.time_ns()
                link.send(question)
                answer = _received(link, number)
                after = time.time_ns()
                if answer is None:
                    continue
                count += 1
                exchange = after - before, (before + after) // 2 - answer
                if exchange[0] >= 0:  # the clock was not set back meanwhile
                    best = exchange if best is None else min(best, exchange)
    if best is None:
        return None
    return {"offset": best[1] * 1e-9, "uncertainty": best[0] * 0.5e-9, "round_trips": count}


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
