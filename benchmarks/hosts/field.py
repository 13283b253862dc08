"""Where ranks run, and what the kernel counted there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.testbed import Host, Testbed

ROOT = Path(__file__).resolve().parents[2]


class Field:
    """Hosts with the same number of ranks each."""

    networked = False  # between hosts there are links of a known rate
    rate: float | None = None  # bytes per second of one host, all its NICs together, each way

    def __init__(
        self,
        hosts: Sequence[Host | Part],
        ranks_per_host: int,
        folder: Path,  # of this run: pipes, logs, stores
        core: Path,  # the program core_collectives
        peers: Path,  # where peers.py put them
    ) -> None:
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.folder = folder
        self.core = core
        self.peers = peers

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def host_of(self, rank: int) -> Host | Part:
        """Ranks are dealt out in blocks: host 0 has the first ones."""
        return self.hosts[rank // self.ranks_per_host]

    @property
    def nics(self) -> int | None:
        return None

    def ceiling(self) -> float | None:
        """Utilisation that bulk TCP reaches, both ways at once between all hosts."""
        return None

    def wire_bytes(self) -> list[dict[str, int]]:
        """Per host, bytes sent and received so far."""
        return []

    def moved_since(self, before: list[dict[str, int]]) -> int | None:
        """Of the busiest host in its busier direction since ``wire_bytes`` said ``before``."""
        hosts = zip(before, self.wire_bytes(), strict=True)
        return max((now[way] - then[way] for then, now in hosts for way in now), default=None)

    def drops(self) -> int | None:
        """Packets dropped so far at any end of any link."""
        return None


class Network(Field):
    """Emulated hosts with links between them."""

    networked = True

    def __init__(
        self, bed: Testbed, ranks_per_host: int, folder: Path, core: Path, peers: Path
    ) -> None:
        super().__init__(bed.hosts, ranks_per_host, folder, core, peers)
        self.bed = bed
        self.rate = sum(bed.rates[0]) / 8

    @property
    def nics(self) -> int | None:
        return len(self.bed.rates[0])

    def ceiling(self) -> float | None:
        from tests.testbed import ceiling

        return ceiling(self.bed).utilisation

    def wire_bytes(self) -> list[dict[str, int]]:
        out = []
        for host in range(len(self.hosts)):
            nics = self.bed.counters(host)
            out.append({way: sum(nic[way] for nic in nics) for way in ("tx_bytes", "rx_bytes")})
        return out

    def drops(self) -> int | None:
        return sum(
            direction["drops"]
            for host in range(len(self.hosts))
            for nic in self.bed.drops(host)
            for direction in nic.values()
        )


class Machine(Field):
    """This machine as it is: one host, or several that are hosts by name only."""

    def __init__(
        self, hosts: int, ranks_per_host: int, folder: Path, core: Path, peers: Path
    ) -> None:
        parts = [Part(f"part{i}", alone=hosts == 1) for i in range(hosts)]
        super().__init__(parts, ranks_per_host, folder, core, peers)


class Part:
    """Some processes of this machine, under the name of a host."""

    def __init__(self, name: str, alone: bool) -> None:
        self.name = name
        self.alone = alone
        self.interfaces = ["lo"]

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str], **kw: Any
    ) -> subprocess.Popen[Any]:
        environment = os.environ | {"SMDDP_HOST_ID": self.name, "MASTER_ADDR": "127.0.0.1"}
        if not self.alone:
            environment.setdefault("SMDDP_FABRIC_INTERFACE", "lo")
        return subprocess.Popen(argv, env=environment | dict(env), **kw)
