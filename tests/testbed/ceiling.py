"""The practical ceiling of a testbed: the throughput to compare a benchmark's figures with."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from . import traffic
from .bed import Testbed

PORT = 5201


@dataclass(frozen=True)
class Ceiling:
    """Throughput of plain sockets when every host sends to all others at the same time."""

    received: list[float]  # payload bytes per second into each host, median of the windows
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


def ceiling(bed: Testbed, seconds: float = 4.0, warm_up: float = 1.0) -> Ceiling:
    """Measure bulk TCP between all pairs of hosts in both directions, over all NICs.

    The measurement lasts ``seconds`` after ``warm_up``. It does not occupy processors that it does
    not need, but other load on this machine changes the result.
    """
    if len(bed.hosts) < 2:
        raise ValueError("a ceiling needs at least two hosts")
    window = 0.25
    processes: list[subprocess.Popen[Any]] = []
    try:
        for host in bed.hosts:
            peers = bed.hosts[host.index + 1 :] + bed.hosts[: host.index]
            order = {
                "listen": host.addresses,
                "connect": [address for peer in peers for address in peer.addresses],
                "port": PORT,
                "windows": max(1, round(seconds / window)),
                "window": window,
            }
            command = [sys.executable, "-I", "-S", traffic.__file__, json.dumps(order)]
            pipe = subprocess.PIPE
            processes.append(host.popen(command, stdin=pipe, stdout=pipe, text=True))
        for process in processes:
            _answer(process)
        before = _segments(bed)
        start = time.monotonic() + warm_up
        for process in processes:
            process.stdin.write(f"{start}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        received = [statistics.median(json.loads(_answer(process))) for process in processes]
        after = _segments(bed)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
    sent, again = (late - early for early, late in zip(before, after, strict=True))
    rate = [sum(rates) / 8 for rates in bed.rates]
    return Ceiling(received, rate, again / max(1, sent))


def _answer(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None
    line: str = process.stdout.readline()
    if not line:
        raise RuntimeError(f"bulk traffic ended early, status {process.wait()}")
    return line
