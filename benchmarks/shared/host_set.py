"""The hosts that the ranks of a run are on, and the kernel's counters there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.testbed import Host, Testbed

ROOT = Path(__file__).resolve().parents[2]


class HostSet:
    """Hosts with the same number of ranks each."""

    networked = False  # whether links of a known rate join the hosts
    rate: float | None = None  # bytes per second of one host, all its NICs together, each way

    def __init__(
        self,
        hosts: Sequence[Host | NamedHost],
        ranks_per_host: int,
        folder: Path,  # of this run: pipes, logs, stores
    ) -> None:
        self._hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.folder = folder

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host | NamedHost]:
        return iter(self._hosts)

    @property
    def first(self) -> Host | NamedHost:
        return self._hosts[0]

    @property
    def interfaces(self) -> list[str]:
        """Names of the network interfaces, which are the same on every host."""
        return self.first.interfaces

    @property
    def ranks(self) -> int:
        return len(self) * self.ranks_per_host

    def host_of(self, rank: int) -> Host | NamedHost:
        """Host 0 has the first ``ranks_per_host`` ranks, host 1 the next ones, and so on."""
        return self._hosts[rank // self.ranks_per_host]

    @property
    def nics(self) -> int | None:
        return None

    def ceiling(self) -> float | None:
        """Utilisation that bulk TCP reaches, both ways at once between all hosts."""
        return None

    def wire_bytes(self) -> list[dict[str, int]]:
        """Bytes sent and received so far, per host."""
        return []

    def moved_since(self, before: list[dict[str, int]]) -> int | None:
        """Bytes of the busiest host in its busier direction since ``wire_bytes`` was ``before``."""
        hosts = zip(before, self.wire_bytes(), strict=True)
        return max((now[way] - then[way] for then, now in hosts for way in now), default=None)

    def drops(self) -> int | None:
        """Packets dropped so far at both ends of all links."""
        return None


class EmulatedHosts(HostSet):
    """Hosts of a testbed, with links between them."""

    networked = True

    def __init__(self, bed: Testbed, ranks_per_host: int, folder: Path) -> None:
        super().__init__(bed.hosts, ranks_per_host, folder)
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
        for host in range(len(self)):
            nics = self.bed.counters(host)
            out.append({way: sum(nic[way] for nic in nics) for way in ("tx_bytes", "rx_bytes")})
        return out

    def drops(self) -> int | None:
        return sum(
            direction["drops"]
            for host in range(len(self))
            for nic in self.bed.drops(host)
            for direction in nic.values()
        )


class ThisMachine(HostSet):
    """This machine as it is: one host, or several that are hosts by name only."""

    def __init__(self, hosts: int, ranks_per_host: int, folder: Path) -> None:
        named = [NamedHost(f"part{i}", alone=hosts == 1) for i in range(hosts)]
        super().__init__(named, ranks_per_host, folder)


class NamedHost:
    """Starts processes of this machine under the name of a host."""

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


def make_testbed(hosts: int, rate: str, nics: int) -> Testbed | str:
    """A testbed to be used in a ``with`` block, or the reason why none is possible here."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # for tests.testbed
    from tests.testbed import Testbed

    return Testbed.missing() or Testbed(hosts=hosts, rate=rate, nics=nics)
