"""The peers that peers.py compiles: the MPI libraries, each with its launcher, and oneCCL.

They get the best settings for TCP, and defaults otherwise. A launcher runs on the first host. In
place of ssh it calls a script of this run, which enters the host. The daemons of the launcher sleep
while the ranks run.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path

from shared.competitor import rank_environment
from shared.host_set import EmulatedHosts, HostSet
from shared.launched_ranks import LaunchedRanks

from .cases import FROM_TORCH_ALONE, MESSAGE
from .competitors import CallCompetitor


def enter_script(hosts: HostSet) -> Path:
    """A script in place of ssh, which enters a host of the testbed: HOST COMMAND..."""
    assert isinstance(hosts, EmulatedHosts)
    path = hosts.folder / "enter-host"
    if not path.exists():
        cases = [f"{host.name}|{host.addresses[0]}) pid={host.pid} ;;" for host in hosts.bed.hosts]
        lines = [
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',  # skips options of ssh
            'case "$1" in',
            *cases,
            '*) echo "no host $1" >&2; exit 1 ;;',
            "esac",
            "shift",
            'exec nsenter -t "$pid" --net --uts --mount -- /bin/sh -c "$*"',
        ]
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)
    return path


TUNABLE = ("MPIR_CVAR_", "I_MPI_", "CCL_", "UCX_", "FI_", "OMPI_MCA_")


def unless_set(env: dict[str, str]) -> dict[str, str]:
    """``env`` without those settings of the libraries that the caller's environment has set."""
    return {k: v for k, v in env.items() if not (k.startswith(TUNABLE) and k in os.environ)}


def oversubscribed(hosts: HostSet) -> bool:
    """Whether waiting ranks would spin on processors that other ranks need."""
    return hosts.ranks > (os.cpu_count() or 1)


def hydra_options(hosts: HostSet, option: str) -> list[str]:
    """The options of Hydra, the launcher of MPICH and Intel MPI, which name ``option`` differently.

    ``option`` says how Hydra reaches the hosts.
    """
    if not hosts.networked:
        return [option, "fork", "-n", str(hosts.ranks)]
    argv = [option, "ssh", f"{option}-exec", str(enter_script(hosts))]
    argv += ["-hosts", ",".join(host.name for host in hosts)]
    return [*argv, "-ppn", str(hosts.ranks_per_host), "-n", str(hosts.ranks)]


class Peer(CallCompetitor):
    folder = ""  # below the folder of all peers
    program = "mpi_collectives"

    def __init__(self, peers: Path) -> None:
        self.home = (peers / self.folder).resolve()

    def missing(self, hosts: HostSet) -> str | None:
        if len(hosts) > 1 and not hosts.networked:
            return "it detects that these hosts are one machine"
        program = self.home / self.program
        if program.exists():
            return None
        return f"{program} is missing; `python benchmarks/peers.py {self.folder}` makes it"


class MpiProgram(Peer):
    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        program = [str(self.home / self.program), str(ranks.folder)]
        env = {"OMP_NUM_THREADS": "1"} | unless_set(self.environment(hosts))
        ranks.launch(hosts.first, self.launcher(hosts) + program, env, "launcher")

    @abstractmethod
    def launcher(self, hosts: HostSet) -> list[str]:
        """The command that starts the program on all ranks, without the program."""

    @abstractmethod
    def environment(self, hosts: HostSet) -> dict[str, str]:
        """The library's settings."""


class Mpich(MpiProgram):
    """MPICH 5, whose wheel has both network modules: libfabric (bundled) and UCX."""

    folder = "mpich"

    def __init__(self, peers: Path, netmod: str) -> None:
        super().__init__(peers)
        self.netmod = netmod
        self.name = "mpich" if netmod == "ofi" else f"mpich-{netmod}"

    def launcher(self, hosts: HostSet) -> list[str]:
        mpiexec = str(self.home / "bin" / "mpiexec")
        return [mpiexec, "-bind-to", "none", *hydra_options(hosts, "-launcher")]

    def environment(self, hosts: HostSet) -> dict[str, str]:
        env = {"MPIR_CVAR_CH4_NETMOD": self.netmod}
        if oversubscribed(hosts):
            # MPICH's own shared-memory collectives spin on flags and wait for whole time slices;
            # its collectives over messages yield.
            for op in ("ALLREDUCE", "BCAST", "REDUCE", "BARRIER"):
                env[f"MPIR_CVAR_{op}_POSIX_INTRA_ALGORITHM"] = "mpir"
        if not hosts.networked:
            return env
        if self.netmod == "ucx":
            return env | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": ",".join(hosts.interfaces)}
        env["FI_PROVIDER"] = "tcp"
        if len(hosts.interfaces) == 1:
            env["FI_TCP_IFACE"] = ",".join(hosts.interfaces)
        else:
            env["MPIR_CVAR_CH4_OFI_MAX_NICS"] = str(len(hosts.interfaces))
        return env


class IntelMpi(MpiProgram):
    """Intel MPI with the libfabric of its wheel."""

    name = folder = "impi"

    def launcher(self, hosts: HostSet) -> list[str]:
        return [str(self.home / "bin" / "mpiexec.hydra"), *hydra_options(hosts, "-bootstrap")]

    def environment(self, hosts: HostSet) -> dict[str, str]:
        home = self.home
        env = {
            "I_MPI_ROOT": str(home),
            "LD_LIBRARY_PATH": str(home / "lib"),
            "FI_PROVIDER_PATH": str(home / "lib"),
            "I_MPI_PIN": "0",
        }
        if oversubscribed(hosts):
            env["I_MPI_WAIT_MODE"] = "1"  # waiting ranks block
        if not hosts.networked:
            return env | {"I_MPI_FABRICS": "shm"}
        env |= {
            "I_MPI_FABRICS": "shm:ofi",
            "I_MPI_OFI_PROVIDER": "tcp",
            "FI_PROVIDER": "tcp",
            "I_MPI_HYDRA_IFACE": hosts.interfaces[0],
        }
        if len(hosts.interfaces) == 1:
            env["FI_TCP_IFACE"] = ",".join(hosts.interfaces)
        else:
            env["I_MPI_MULTIRAIL"] = "1"
        if hosts.ranks_per_host > 1:
            # A ring sends large parts over the network once; the library's own choice sends the
            # part of every rank to every rank.
            env["I_MPI_ADJUST_ALLGATHER"] = "3:65536-2147483647"
        return env


class OpenMpi(MpiProgram):
    """Open MPI 5 with its own TCP transport; it uses hierarchical collectives (han) by default."""

    name = folder = "openmpi"

    def launcher(self, hosts: HostSet) -> list[str]:
        per_host = hosts.ranks_per_host
        argv = [str(self.home / "bin" / "mpirun"), "--allow-run-as-root"]
        if hosts.networked:
            argv += ["--prtemca", "plm_ssh_agent", str(enter_script(hosts))]
            argv += ["--host", ",".join(f"{host.name}:{per_host}" for host in hosts)]
        argv += ["--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        for name, value in self.parameters(hosts).items():
            argv += ["--mca", name, value]
        return [*argv, "-n", str(hosts.ranks)]

    def parameters(self, hosts: HostSet) -> dict[str, str]:
        out = {"pml": "ob1", "btl": "self,sm"}
        if hosts.networked:
            out = {"pml": "ob1", "btl": "self,sm,tcp"}
            out["btl_tcp_if_include"] = ",".join(hosts.interfaces)
        if oversubscribed(hosts):
            out["mpi_yield_when_idle"] = "1"
        return out

    def environment(self, hosts: HostSet) -> dict[str, str]:
        return {"OPAL_PREFIX": str(self.home), "PRTE_PREFIX": str(self.home)}


class OneCcl(Peer):
    """oneCCL over libfabric (the one of Intel MPI's wheel), started rank by rank."""

    name = folder = "oneccl"
    program = "oneccl_collectives"
    lacks = (*FROM_TORCH_ALONE, MESSAGE)

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        store = ranks.folder / "store"
        store.mkdir()
        home = self.home
        argv = [str(home / self.program), str(ranks.folder), str(store)]
        for rank in range(hosts.ranks):
            env = rank_environment(hosts, rank) | {
                "LD_LIBRARY_PATH": str(home / "lib"),
                "CCL_ATL_TRANSPORT": "ofi",
                "CCL_ATL_SHM": "1",  # between ranks of a host
                "FI_PROVIDER": "tcp",
                "FI_PROVIDER_PATH": str(home / "lib"),
                "FI_TCP_IFACE": hosts.interfaces[0],
                "CCL_KVS_IFACE": hosts.interfaces[0],
                "CCL_PROCESS_LAUNCHER": "none",
                "CCL_LOCAL_RANK": str(rank % hosts.ranks_per_host),
                "CCL_LOCAL_SIZE": str(hosts.ranks_per_host),
                # The calling thread does the work, and yields while it waits. The default, another
                # thread per rank that spins, took a thousand times as long here.
                "CCL_WORKER_OFFLOAD": "0",
                "CCL_YIELD": "sched_yield",
            }
            ranks.launch(hosts.host_of(rank), argv, unless_set(env), f"rank{rank}")


def peer(name: str, peers: Path) -> Peer:
    """``peers``: the folder into which peers.py installs all of them."""
    made: dict[str, Peer] = {
        "mpich": Mpich(peers, "ofi"),
        "mpich-ucx": Mpich(peers, "ucx"),
        "impi": IntelMpi(peers),
        "openmpi": OpenMpi(peers),
        "oneccl": OneCcl(peers),
    }
    return made[name]
