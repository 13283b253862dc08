"""The competitors that this package starts rank by rank. mpi.py has those with a launcher."""

from __future__ import annotations

from pathlib import Path

from shared.build import Build
from shared.competitor import Competitor, free_port, rank_environment
from shared.host_set import ROOT, HostSet
from shared.launched_ranks import LaunchedRanks

from .cases import FROM_TORCH_ALONE, MESSAGE, Case


class CallCompetitor(Competitor):
    """A library whose collectives are called."""

    lacks: tuple[str, ...] = FROM_TORCH_ALONE  # operations

    def measures(self, case: Case) -> bool:
        """Whether a figure of the case means something for this competitor."""
        return case.op not in self.lacks


class Core(CallCompetitor):
    """The collectives of csrc/, without torch."""

    def __init__(self, name: str, build: Build, *options: str) -> None:
        self.name = f"{name}{build.suffix}"
        self.build = build
        self.options = options

    def missing(self, hosts: HostSet) -> str | None:
        return self.build.missing_core()

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        store = ranks.folder / "store"
        store.mkdir()
        argv = [str(self.build.core), str(ranks.folder), str(store), *self.options]
        for rank in range(hosts.ranks):
            env = rank_environment(hosts, rank) | self.environment()
            ranks.launch(hosts.host_of(rank), argv, env, f"rank{rank}")

    def environment(self) -> dict[str, str]:
        """Settings of this competitor alone."""
        return {}


class Forced(Core):
    """The core with one way of several, whatever it would choose: a setting in SMDDP_DEBUG."""

    def __init__(self, name: str, build: Build, setting: str) -> None:
        super().__init__(name, build)
        self.setting = setting

    def missing(self, hosts: HostSet) -> str | None:
        one_host, alone = len(hosts) < 2, hosts.ranks_per_host < 2
        if self.setting == "algorithm=log" and len(hosts) < 3:
            return "the logarithmic pattern needs three hosts"
        if self.setting == "algorithm=joint" and (one_host or alone):
            return "the joint pattern needs two hosts of two ranks"
        if self.setting.startswith("single_copy") and not one_host:
            return "between hosts no rank reads another one's memory"
        return super().missing(hosts)

    def measures(self, case: Case) -> bool:
        joint = self.setting == "algorithm=joint"
        return super().measures(case) and not (joint and case.op != "all_gather")

    def environment(self) -> dict[str, str]:
        return {"SMDDP_DEBUG": self.setting}


class Copy(CallCompetitor):
    """The bare copy between ranks that share memory, without any library."""

    name = "copy"
    lacks = (*FROM_TORCH_ALONE, MESSAGE)

    def __init__(self, program: Path) -> None:
        self.program = program

    def missing(self, hosts: HostSet) -> str | None:
        if len(hosts) > 1:
            return "it copies inside one host only"
        if self.program.exists():
            return None
        return f"{self.program} is not built; `make bench-programs` builds it"

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        argv = [str(self.program), str(ranks.folder), str(hosts.ranks)]
        ranks.launch(hosts.first, argv, {}, "ranks")


class Sockets(CallCompetitor):
    """Bare TCP sockets between hosts, without libfabric and without an engine."""

    def __init__(self, name: str, program: Path, doubling: bool) -> None:
        self.name = name
        self.program = program
        self.doubling = doubling

    def measures(self, case: Case) -> bool:
        known = ("all_gather",) if self.doubling else ("all_gather", "reduce_scatter")
        return case.op in known and case.dtype == "fp32" and case.bytes <= 256 << 10

    def missing(self, hosts: HostSet) -> str | None:
        if len(hosts) < 2:
            return "it is for several hosts"
        if self.doubling and (hosts.ranks_per_host > 1 or len(hosts) & (len(hosts) - 1)):
            return "doubling needs a power of two of hosts with one rank each"
        if self.program.exists():
            return None
        return f"{self.program} is not built; `make bench-programs` builds it"

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        store = ranks.folder / "store"
        store.mkdir()
        for rank in range(hosts.ranks):
            host = hosts.host_of(rank)
            argv = [str(self.program), str(ranks.folder), str(store)]
            argv += [host.interfaces[0], f"host{rank // hosts.ranks_per_host}"]
            argv += ["doubling"] if self.doubling else []
            ranks.launch(host, argv, rank_environment(hosts, rank), f"rank{rank}")


class Torch(CallCompetitor):
    """A backend of torch.distributed, called from Python."""

    def __init__(self, name: str, backend: str, build: Build) -> None:
        self.name = f"{name}{build.suffix}"
        self.backend = backend
        self.build = build

    def measures(self, case: Case) -> bool:
        return True

    def missing(self, hosts: HostSet) -> str | None:
        return self.build.missing_package()

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        program = ROOT / "benchmarks" / "torch_collectives.py"
        argv = [str(self.build.python), str(program), self.backend, str(ranks.folder)]
        port = str(free_port(hosts))
        for rank in range(hosts.ranks):
            host = hosts.host_of(rank)
            env = rank_environment(hosts, rank) | {
                "MASTER_PORT": port,
                # Gloo takes several interfaces and spreads its connections over them.
                "GLOO_SOCKET_IFNAME": ",".join(host.interfaces),
            }
            ranks.launch(host, argv, env, f"rank{rank}")


class Fake(Torch):
    """torch's own backend that does nothing: the cost of a call before any backend is reached."""

    def __init__(self, build: Build) -> None:
        super().__init__("fake", "fake", build)

    def measures(self, case: Case) -> bool:
        return case.bytes <= 4096
