"""The practical ceiling of a testbed: the throughput to compare a benchmark's figures with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from . import traffic
from .bed import Testbed
from .host import Host


@dataclass(frozen=True)
class Ceiling:
    """Throughput of plain sockets when every host sends to all others at the same time."""

    received: list[float]  # payload bytes per second into each host
    rate: list[float]  # bytes per second of all links of each host together, headers included
    retransmitted: float  # share of the sent TCP segments that are retransmissions

    @property
    def utilisation(self) -> float:
        """Payload over rate of the slowest host; at most 1448/1514 with an MTU of 1500."""
        return min(got / rate for got, rate in zip(self.received, self.rate, strict=True))

    def __str__(self) -> str:
        got = ", ".join(f"{value / 1e6:.2f}" for value in self.received)
        return (
            f"{got} MB/s of payload into each host, {100 * self.utilisation:.1f} % of the rate;"
            f" {100 * self.retransmitted:.3f} % of segments retransmitted"
        )


class Bulk:
    """TCP traffic from this host to ``peers`` and back, as fast as the links allow."""

    def __init__(self, host: Host, peers: list[Host]) -> None:
        order = [host.addresses, [address for peer in peers for address in peer.addresses]]
        command = [sys.executable, "-I", "-S", traffic.__file__, json.dumps(order)]
        pipe = subprocess.PIPE
        self.process: subprocess.Popen[Any] = host.popen(
            command, stdin=pipe, stdout=pipe, text=True
        )
        self.read()

    def ask(self) -> None:
        """The first time: begin to send. Later: what has been received?"""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def read(self) -> tuple[float, int]:
        """The answer: seconds of the monotonic clock, bytes received."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"bulk traffic ended early, status {self.process.wait()}")
        seconds, count = json.loads(line)
        return seconds, count


def ceiling(bed: Testbed, seconds: float = 4.0, warm_up: float = 1.0) -> Ceiling:
    """Measure bulk TCP between all pairs of hosts in both directions, over all NICs.

    The measurement lasts ``seconds`` after ``warm_up``. It does not occupy processors that it does
    not need, but other load on this machine changes the result.
    """
    if len(bed.hosts) < 2:
        raise ValueError("a ceiling needs at least two hosts")
    started: list[Bulk] = []
    try:
        for host in bed.hosts:
            peers = bed.hosts[host.index + 1 :] + bed.hosts[: host.index]
            started.append(Bulk(host, peers))
        marks = []
        sent = _segments(bed)
        for wait in (warm_up, seconds, 0.0):
            for bulk in started:
                bulk.ask()
            marks.append([bulk.read() for bulk in started])
            time.sleep(wait)
        segments, again = (late - early for early, late in zip(sent, _segments(bed), strict=True))
    finally:
        for bulk in started:
            bulk.process.kill()
        for bulk in started:
            bulk.process.communicate()
    pairs = zip(marks[1], marks[2], strict=True)
    received = [(b - a) / (t - s) for (s, a), (t, b) in pairs]
    rate = [sum(rates) / 8 for rates in bed.rates]
    return Ceiling(received, rate, again / max(1, segments))


def _segments(bed: Testbed) -> tuple[int, int]:
    """TCP segments sent and retransmitted by all hosts since they exist."""
    sent = again = 0
    for host in bed.hosts:
        lines = host.read_net("snmp").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        row = dict(zip(names, values, strict=True))
        sent += int(row["OutSegs"])
        again += int(row["RetransSegs"])
    return sent, again
