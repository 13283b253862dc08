"""How each competitor is started: one process per rank, on its host. mpi.py has those of MPI."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from itertools import count
from pathlib import Path

from .crew import Crew
from .field import ROOT, Field
from .plan import Case

_ports = count(29600)  # every port of a fresh testbed is free


def free_port(field: Field) -> int:
    if field.networked:
        return next(_ports)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Competitor(ABC):
    name: str

    def missing(self, field: Field) -> str | None:
        """Why it can't take part here, or None."""
        return None

    def plays(self, case: Case) -> bool:
        """Whether the case says anything about it."""
        return True

    def start(self, field: Field) -> Crew:
        """Starts its ranks and waits until all read their pipes."""
        crew = Crew(self.name, field.folder / self.name, field.ranks)
        try:
            self.launch(field, crew)
            crew.wait_until_ready(timeout=60 + 6 * field.ranks)
        except BaseException:
            crew.close()
            raise
        return crew

    @abstractmethod
    def launch(self, field: Field, crew: Crew) -> None: ...


def rank_environment(field: Field, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % field.ranks_per_host),
        "WORLD_SIZE": str(field.ranks),
        "LOCAL_WORLD_SIZE": str(field.ranks_per_host),
        "OMP_NUM_THREADS": "1",
    }


class Core(Competitor):
    """The collectives of csrc/ without torch."""

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self.options = options

    def missing(self, field: Field) -> str | None:
        if field.core.exists():
            return None
        return f"{field.core} is not built; `make bench-programs` builds it"

    def launch(self, field: Field, crew: Crew) -> None:
        store = crew.folder / "store"
        store.mkdir()
        for rank in range(field.ranks):
            argv = [str(field.core), str(crew.folder), str(store), *self.options]
            crew.launch(field.host_of(rank), argv, rank_environment(field, rank), f"rank{rank}")


class Copy(Competitor):
    """The bare copy between ranks that share memory, without any library."""

    name = "copy"

    @staticmethod
    def program(field: Field) -> Path:
        return field.core.with_name("copy_collectives")

    def missing(self, field: Field) -> str | None:
        if len(field.hosts) > 1:
            return "it copies inside one host only"
        if self.program(field).exists():
            return None
        return f"{self.program(field)} is not built; `make bench-programs` builds it"

    def launch(self, field: Field, crew: Crew) -> None:
        argv = [str(self.program(field)), str(crew.folder), str(field.ranks)]
        crew.launch(field.hosts[0], argv, {}, "ranks")


class Torch(Competitor):
    """A backend of torch.distributed, called from Python."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.backend = backend

    def launch(self, field: Field, crew: Crew) -> None:
        program = ROOT / "benchmarks" / "torch_collectives.py"
        port = str(free_port(field))
        for rank in range(field.ranks):
            host = field.host_of(rank)
            env = rank_environment(field, rank) | {
                "MASTER_PORT": port,
                # Gloo takes several interfaces and deals its connections out to them.
                "GLOO_SOCKET_IFNAME": ",".join(host.interfaces),
            }
            argv = [sys.executable, str(program), self.backend, str(crew.folder)]
            crew.launch(host, argv, env, f"rank{rank}")


class Fake(Torch):
    """torch's own backend that does nothing: what a call costs before any backend sees it."""

    def __init__(self) -> None:
        super().__init__("fake", "fake")

    def plays(self, case: Case) -> bool:
        return case.bytes <= 4096
