"""The peers that come with a launcher of their own: best settings for TCP, else defaults.

A launcher runs on the first host. Where it would call ssh it calls a script of this run instead,
which enters the host. The launcher's daemons sleep while the ranks run.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path

from .competitors import Competitor, rank_environment
from .crew import Crew
from .field import Field, Network


def enter_script(field: Field) -> Path:
    """An ssh that enters a host of the testbed: HOST COMMAND..."""
    assert isinstance(field, Network)
    path = field.folder / "enter-host"
    if not path.exists():
        hosts = [f"{host.name}|{host.addresses[0]}) pid={host.pid} ;;" for host in field.bed.hosts]
        lines = [
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',  # ssh's own options
            'case "$1" in',
            *hosts,
            '*) echo "no host $1" >&2; exit 1 ;;',
            "esac",
            "shift",
            'exec nsenter -t "$pid" --net --uts --mount -- /bin/sh -c "$*"',
        ]
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)
    return path


TUNABLE = ("MPIR_CVAR_", "I_MPI_", "CCL_", "UCX_", "FI_", "OMPI_MCA_")


def unless_told(env: dict[str, str]) -> dict[str, str]:
    """Leaves out the settings of the libraries that the caller's environment has otherwise."""
    return {k: v for k, v in env.items() if not (k.startswith(TUNABLE) and k in os.environ)}


class Peer(Competitor):
    folder = ""  # below that of all peers
    program = "mpi_collectives"

    def missing(self, field: Field) -> str | None:
        if len(field.hosts) > 1 and not field.networked:
            return "it knows that these hosts are one machine"
        program = field.peers / self.folder / self.program
        if program.exists():
            return None
        return f"{program} is missing; `python benchmarks/peers.py {self.folder}` makes it"

    def home(self, field: Field) -> Path:
        return (field.peers / self.folder).resolve()

    def interfaces(self, field: Field) -> str:
        return ",".join(field.hosts[0].interfaces)

    @staticmethod
    def oversubscribed(field: Field) -> bool:
        """Whether waiting ranks would spin on processors that others need."""
        return field.ranks > (os.cpu_count() or 1)


class MpiProgram(Peer):
    def launch(self, field: Field, crew: Crew) -> None:
        program = [str(self.home(field) / self.program), str(crew.folder)]
        env = {"OMP_NUM_THREADS": "1"} | unless_told(self.environment(field))
        crew.launch(field.hosts[0], self.launcher(field) + program, env, "launcher")

    @abstractmethod
    def launcher(self, field: Field) -> list[str]: ...

    @abstractmethod
    def environment(self, field: Field) -> dict[str, str]: ...


class Mpich(MpiProgram):
    """MPICH 5, whose wheel has both network modules: libfabric (bundled) and UCX."""

    folder = "mpich"

    def __init__(self, netmod: str) -> None:
        self.netmod = netmod
        self.name = "mpich" if netmod == "ofi" else f"mpich-{netmod}"

    def launcher(self, field: Field) -> list[str]:
        argv = [str(self.home(field) / "bin" / "mpiexec"), "-bind-to", "none"]
        if not field.networked:
            return [*argv, "-launcher", "fork", "-n", str(field.ranks)]
        argv += ["-launcher", "ssh", "-launcher-exec", str(enter_script(field))]
        argv += ["-hosts", ",".join(host.name for host in field.hosts)]
        return [*argv, "-ppn", str(field.ranks_per_host), "-n", str(field.ranks)]

    def environment(self, field: Field) -> dict[str, str]:
        env = {"MPIR_CVAR_CH4_NETMOD": self.netmod}
        if self.oversubscribed(field):
            # Its own shared-memory collectives spin on flags and wait for whole time slices; those
            # over messages yield.
            for op in ("ALLREDUCE", "BCAST", "REDUCE", "BARRIER"):
                env[f"MPIR_CVAR_{op}_POSIX_INTRA_ALGORITHM"] = "mpir"
        if not field.networked:
            return env
        if self.netmod == "ucx":
            return env | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": self.interfaces(field)}
        env["FI_PROVIDER"] = "tcp"
        if len(field.hosts[0].interfaces) == 1:
            env["FI_TCP_IFACE"] = self.interfaces(field)
        else:
            env["MPIR_CVAR_CH4_OFI_MAX_NICS"] = str(len(field.hosts[0].interfaces))
        return env


class IntelMpi(MpiProgram):
    """Intel MPI with the libfabric of its wheel."""

    name = folder = "impi"

    def launcher(self, field: Field) -> list[str]:
        argv = [str(self.home(field) / "bin" / "mpiexec.hydra")]
        if not field.networked:
            return [*argv, "-bootstrap", "fork", "-n", str(field.ranks)]
        argv += ["-bootstrap", "ssh", "-bootstrap-exec", str(enter_script(field))]
        argv += ["-hosts", ",".join(host.name for host in field.hosts)]
        return [*argv, "-ppn", str(field.ranks_per_host), "-n", str(field.ranks)]

    def environment(self, field: Field) -> dict[str, str]:
        home = self.home(field)
        env = {
            "I_MPI_ROOT": str(home),
            "LD_LIBRARY_PATH": str(home / "lib"),
            "FI_PROVIDER_PATH": str(home / "lib"),
            "I_MPI_PIN": "0",
        }
        if self.oversubscribed(field):
            env["I_MPI_WAIT_MODE"] = "1"  # waiting ranks block
        if not field.networked:
            return env | {"I_MPI_FABRICS": "shm"}
        env |= {
            "I_MPI_FABRICS": "shm:ofi",
            "I_MPI_OFI_PROVIDER": "tcp",
            "FI_PROVIDER": "tcp",
            "I_MPI_HYDRA_IFACE": field.hosts[0].interfaces[0],
        }
        if len(field.hosts[0].interfaces) == 1:
            env["FI_TCP_IFACE"] = self.interfaces(field)
        else:
            env["I_MPI_MULTIRAIL"] = "1"
        if field.ranks_per_host > 1:
            # A ring crosses the network once for large parts; its own choice sends every rank's.
            env["I_MPI_ADJUST_ALLGATHER"] = "3:65536-2147483647"
        return env


class OpenMpi(MpiProgram):
    """Open MPI 5 with its own TCP transport; hierarchical collectives (han) are its default."""

    name = folder = "openmpi"

    def launcher(self, field: Field) -> list[str]:
        per_host = field.ranks_per_host
        argv = [str(self.home(field) / "bin" / "mpirun"), "--allow-run-as-root"]
        if field.networked:
            argv += ["--prtemca", "plm_ssh_agent", str(enter_script(field))]
            argv += ["--host", ",".join(f"{host.name}:{per_host}" for host in field.hosts)]
        argv += ["--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        for name, value in self.parameters(field).items():
            argv += ["--mca", name, value]
        return [*argv, "-n", str(field.ranks)]

    def parameters(self, field: Field) -> dict[str, str]:
        out = {"pml": "ob1", "btl": "self,sm"}
        if field.networked:
            out = {"pml": "ob1", "btl": "self,sm,tcp"}
            out["btl_tcp_if_include"] = self.interfaces(field)
        if self.oversubscribed(field):
            out["mpi_yield_when_idle"] = "1"
        return out

    def environment(self, field: Field) -> dict[str, str]:
        return {"OPAL_PREFIX": str(self.home(field)), "PRTE_PREFIX": str(self.home(field))}


class OneCcl(Peer):
    """oneCCL over libfabric (the one of Intel MPI's wheel), started rank by rank."""

    name = folder = "oneccl"
    program = "oneccl_collectives"

    def launch(self, field: Field, crew: Crew) -> None:
        store = crew.folder / "store"
        store.mkdir()
        home = self.home(field)
        argv = [str(home / self.program), str(crew.folder), str(store)]
        for rank in range(field.ranks):
            env = rank_environment(field, rank) | {
                "LD_LIBRARY_PATH": str(home / "lib"),
                "CCL_ATL_TRANSPORT": "ofi",
                "CCL_ATL_SHM": "1",  # between ranks of a host
                "FI_PROVIDER": "tcp",
                "FI_PROVIDER_PATH": str(home / "lib"),
                "FI_TCP_IFACE": field.hosts[0].interfaces[0],
                "CCL_KVS_IFACE": field.hosts[0].interfaces[0],
                "CCL_PROCESS_LAUNCHER": "none",
                "CCL_LOCAL_RANK": str(rank % field.ranks_per_host),
                "CCL_LOCAL_SIZE": str(field.ranks_per_host),
                # The calling thread does the work, and yields while it waits. The default, a
                # thread per rank that spins beside it, took a thousand times as long here.
                "CCL_WORKER_OFFLOAD": "0",
                "CCL_YIELD": "sched_yield",
            }
            crew.launch(field.host_of(rank), argv, unless_told(env), f"rank{rank}")


def peer(name: str) -> Competitor:
    made: dict[str, Competitor] = {
        "mpich": Mpich("ofi"),
        "mpich-ucx": Mpich("ucx"),
        "impi": IntelMpi(),
        "openmpi": OpenMpi(),
        "oneccl": OneCcl(),
    }
    return made[name]
