"""The testbed as a benchmark sees it: where ranks run, and what the kernel counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.testbed import Host, Testbed

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Field:
    bed: Testbed
    ranks_per_host: int
    folder: Path  # of this run: pipes, logs, stores
    core: Path  # the program core_collectives
    peers: Path  # where peers.py put them

    @property
    def hosts(self) -> list[Host]:
        return self.bed.hosts

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def host_of(self, rank: int) -> Host:
        """Ranks are dealt out in blocks: host 0 has the first ones."""
        return self.hosts[rank // self.ranks_per_host]

    @property
    def rate(self) -> float:
        """Bytes per second of one host, all its NICs together, each way."""
        return sum(self.bed.rates[0]) / 8

    def wire_bytes(self) -> list[dict[str, int]]:
        """Per host, bytes sent and received so far."""
        out = []
        for host in range(len(self.hosts)):
            nics = self.bed.counters(host)
            out.append({way: sum(nic[way] for nic in nics) for way in ("tx_bytes", "rx_bytes")})
        return out

    def drops(self) -> int:
        """Packets dropped so far at any end of any link."""
        return sum(
            direction["drops"]
            for host in range(len(self.hosts))
            for nic in self.bed.drops(host)
            for direction in nic.values()
        )
