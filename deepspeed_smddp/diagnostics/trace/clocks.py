"""How far the clocks of a job's hosts are apart, and how sure that is.

Ranks of one host share its clock. Of every other host a rank asks rank 0 for the time, over UDP and
with the sums of NTP. It notes its own time before and after, t0 and t1. With the answer T, its
clock is ahead by (t0 + t1) / 2 - T, off by at most (t1 - t0) / 2, wherever in between the answer
was made (RFC 5905, section 8). The shortest of several exchanges is the surest.

Where no rank has asked, collectives say it: on no rank does an AllGather, ReduceScatter, AllReduce
or barrier end before the last rank has called it. With o as the offset of a host's clock, two hosts
A and B and any such collective,

    call_B - o_B <= end_A - o_A    and    call_A - o_A <= end_B - o_B,

so that o_A - o_B lies between the largest call_A - end_B and the smallest end_A - call_B, over all
collectives. As with a ping, the middle is the estimate, and half the width its uncertainty.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepspeed_smddp.diagnostics.report_exchange import TOKEN_BYTES, Port, reach

# Every rank imports this module, and not pydantic, of which the models are.
if TYPE_CHECKING:
    from deepspeed_smddp.diagnostics.report.dump import Dump

# All members of the group take part in these, and each of them gets something from all others.
_ALL_WITH_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")
_QUESTION = struct.Struct(f"<{TOKEN_BYTES}sQ")  # the token, the number of the question
_ANSWER = struct.Struct("<Qq")  # the number, nanoseconds since 1970
ROUND_TRIPS = 32
_ANSWER_SECONDS = 0.2
_ALL_SECONDS = 1.0


@dataclass(frozen=True)
class HostClock:
    """The clock of a host: what it shows minus what the reference shows, in seconds.

    The true offset lies within ``uncertainty`` of ``offset``; None if nothing bounds it. ``source``
    says in words where the two come from, ``warning`` that the record contradicts them ("" if not).
    """

    host: str
    offset: float
    uncertainty: float | None
    source: str
    warning: str = ""

    @property
    def text(self) -> str:
        """``+3.20 ms, within 0.05 ms``, for people."""
        if self.uncertainty is None:
            return "not known"
        return f"{self.offset * 1e3:+.3f} ms, within {self.uncertainty * 1e3:.3f} ms"


@dataclass
class _Times:
    """One collective on one host: the last call and the first end of its ranks."""

    call: float = -math.inf
    end: float = math.inf


_Collectives = list[dict[str, _Times]]


def host_clocks(dumps: Mapping[int, Dump]) -> dict[str, HostClock]:
    """The clock of each host that has left a dump, by its name.

    The reference is the clock of rank 0, which ranks ask; without a dump of a rank that was asked
    or has asked, that of the lowest rank.
    """
    hosts = list(dict.fromkeys(dump.host for _, dump in sorted(dumps.items())))
    collectives = list(_collectives(dumps))
    clocks: dict[str, HostClock] = {}
    if 0 in dumps:
        clocks[dumps[0].host] = HostClock(dumps[0].host, 0.0, 0.0, "the reference")
    for dump in dumps.values():
        asked = dump.clock
        if asked is None or dump.host == (dumps[0].host if 0 in dumps else None):
            continue
        known = clocks.get(dump.host)
        if known is None or asked.uncertainty < (known.uncertainty or 0.0):
            source = f"{asked.round_trips} round trips to rank 0"
            clocks[dump.host] = HostClock(dump.host, asked.offset, asked.uncertainty, source)
    if not clocks and hosts:
        clocks[hosts[0]] = HostClock(hosts[0], 0.0, 0.0, "the reference")
    if 0 in dumps:
        for host in list(clocks):
            clocks[host] = _checked(clocks[host], dumps[0].host, collectives)
    _place_others(hosts, clocks, collectives)
    return {host: clocks[host] for host in hosts}


def _between(first: str, second: str, collectives: _Collectives) -> tuple[float, float]:
    """Between which values the clock of the first host minus that of the second lies.

    Infinite without a bound; the low value is above the high one if the clocks have drifted.
    """
    low, high = -math.inf, math.inf
    for times in collectives:
        one, other = times.get(first), times.get(second)
        if one is not None and other is not None:
            low = max(low, one.call - other.end)
            high = min(high, one.end - other.call)
    return low, high


def _collectives(dumps: Mapping[int, Dump]) -> Iterator[dict[str, _Times]]:
    """For each collective that several hosts have in their rings, its times by host."""
    found: dict[tuple[str, tuple[int, ...], int, str], dict[str, _Times]] = {}
    for dump in dumps.values():
        members = {group.name: tuple(group.members) for group in dump.groups}
        for op in dump.operations:
            if op.operation not in _ALL_WITH_ALL or op.sequence == 0 or op.bytes == 0:
                continue
            key = (op.group, members.get(op.group, ()), op.sequence, op.operation)
            times = found.setdefault(key, {}).setdefault(dump.host, _Times())
            if op.called is not None:
                times.call = max(times.call, op.called)
            if op.last_byte is not None and op.state == "done":
                times.end = min(times.end, op.last_byte)
    return (times for times in found.values() if len(times) > 1)


def _checked(clock: HostClock, reference: str, collectives: _Collectives) -> HostClock:
    """The clock, with a larger uncertainty if the collectives contradict it."""
    if clock.uncertainty is None or clock.host == reference:
        return clock
    low, high = _between(clock.host, reference, collectives)
    beyond = max(low - clock.offset, clock.offset - high) - clock.uncertainty
    if beyond <= 0:
        return clock
    return replace(
        clock,
        uncertainty=clock.uncertainty + beyond,
        warning=f"during the record this clock and the reference drifted by {beyond * 1e3:.3g} ms",
    )


def _place_others(
    hosts: list[str], clocks: dict[str, HostClock], collectives: _Collectives
) -> None:
    """Adds the hosts of which no rank has asked, the surest ones first."""
    while others := [host for host in hosts if host not in clocks]:
        ways = []
        for known in [clock for clock in clocks.values() if clock.uncertainty is not None]:
            for host in others:
                low, high = _between(host, known.host, collectives)
                if math.isfinite(high - low):
                    uncertainty = (known.uncertainty or 0.0) + abs(high - low) / 2
                    ways.append((uncertainty, host, known.host, known.offset + (low + high) / 2))
        if not ways:
            for host in others:
                clocks[host] = HostClock(host, 0.0, None, "nothing: taken as equal")
            return
        uncertainty, host, via, offset = min(ways)
        clocks[host] = HostClock(host, offset, uncertainty, f"collectives with {via}")


class ClockServer(threading.Thread):
    """Tells the time to those that have the token of its port. It ends with :meth:`close`.

    Args:
        towards: a host of the job: the address that reaches it is published.
        now: the time in nanoseconds since 1970.

    Raises:
        OSError: no port can be opened.
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
        while True:
            try:
                question, sender = link.recvfrom(_QUESTION.size + 1)
            except OSError:
                continue
            if self._ended:
                return
            if len(question) != _QUESTION.size:
                continue
            token, number = _QUESTION.unpack(question)
            if secrets.compare_digest(token, self._port.token):
                with contextlib.suppress(OSError):
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


def measure(contact: str) -> dict[str, Any] | None:
    """How far this clock is ahead of that of a rank, given with its contact.

    Returns:
        ``offset`` and ``uncertainty`` in seconds, and the number of ``round_trips``; None if the
        rank does not answer. Takes a second at most.
    """
    exchanges: list[tuple[int, int]] = []  # the length of each, the offset; in ns
    until = time.monotonic() + _ALL_SECONDS
    link, address, token = reach(contact, socket.SOCK_DGRAM)
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
            if answer is not None:
                exchanges.append((after - before, (before + after) // 2 - answer))
    # One during which the clock was set back does not count.
    length, offset = min((e for e in exchanges if e[0] >= 0), default=(-1, 0))
    if length < 0:
        return None
    return {
        "offset": offset * 1e-9,
        "uncertainty": length * 0.5e-9,
        "round_trips": len(exchanges),
    }


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
