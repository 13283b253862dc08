"""A competitor of a benchmark: how its ranks are started, one process per rank on its host."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from itertools import count

from .host_set import HostSet
from .launched_ranks import LaunchedRanks

_ports = count(29600)  # every port of a new testbed is free


def free_port(hosts: HostSet) -> int:
    if hosts.networked:
        return next(_ports)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(hosts: HostSet, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % hosts.ranks_per_host),
        "WORLD_SIZE": str(hosts.ranks),
        "LOCAL_WORLD_SIZE": str(hosts.ranks_per_host),
        "OMP_NUM_THREADS": "1",
    }


class Competitor(ABC):
    name: str

    def missing(self, hosts: HostSet) -> str | None:
        """The reason why it cannot take part here, or None."""
        return None

    def start_timeout(self, hosts: HostSet) -> float:
        """Seconds within which all ranks have to read their pipes."""
        return 60 + 6 * hosts.ranks

    def start(self, hosts: HostSet) -> LaunchedRanks:
        """Starts its ranks and waits until all of them read their pipes."""
        ranks = LaunchedRanks(self.name, hosts.folder / self.name.replace("/", "-"), hosts.ranks)
        try:
            self.launch(hosts, ranks)
            ranks.wait_until_ready(self.start_timeout(hosts))
        except BaseException:
            ranks.close()
            raise
        return ranks

    @abstractmethod
    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        """Starts the processes of all ranks."""
