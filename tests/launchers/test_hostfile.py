"""DeepSpeed's own launchers for several hosts, with a hostfile of two emulated hosts.

The hosts are namespaces (tests/testbed). A stand-in for `ssh` enters them, with an empty
environment as sshd gives one, so that only what a launcher forwards arrives. pdsh and the mpirun
of Open MPI, MPICH and Intel MPI are the real ones; `srun` is a stand-in that sets Slurm's
variables. mpi4py is hidden.

make test-launchers
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.testbed, pytest.mark.timeout(300, method="signal")]
HERE = Path(__file__).resolve().parent
SLOTS = 2  # ranks of each host

RANK = """\
import socket, sys
sys.modules["mpi4py"] = None
import deepspeed, torch, torch.distributed as dist
deepspeed.init_distributed(dist_backend="smddp")
import deepspeed_smddp
here = torch.tensor([dist.get_rank(), int(socket.gethostname()[-1])])
out = torch.empty(2 * dist.get_world_size(), dtype=torch.int64)
dist.all_gather_into_tensor(out, here)
paths = sorted({r["path"] for r in deepspeed_smddp.statistics() if r["collective"] == "all_gather"})
sys.stdout.write(f"gathered {out.tolist()} {paths}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
SSH = """#!/bin/bash
# ssh [options] HOST COMMAND...
while [[ $1 == -* ]]; do case $1 in -[oplie]) shift 2 ;; *) shift ;; esac; done
host=$1
shift
pid=$(sed -n "s/^$host //p" {hosts})
[[ -n $pid ]] || {{ echo "ssh: no host $host" >&2; exit 255; }}
exec env -i HOME={home} PATH={path} \\
  nsenter -t "$pid" --net --uts --mount -- /bin/bash -c "cd {home}; $*"
"""


class Cluster:
    """Two hosts that reach each other by ``ssh``, and a folder with a hostfile."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.path = os.pathsep.join(
            [str(self.programs), str(Path(sys.executable).parent), "/usr/bin", "/bin", "/usr/sbin"]
        )
        hosts = folder / "hosts"
        named = [(name, host.pid) for host in bed.hosts for name in (host.name, *host.addresses)]
        hosts.write_text("".join(f"{name} {pid}\n" for name, pid in named))
        self.program("ssh", SSH.format(hosts=hosts, home=folder, path=self.path))
        (folder / "hostfile").write_text(
            "".join(f"{host.name} slots={SLOTS}\n" for host in bed.hosts)
        )
        (folder / "rank.py").write_text(RANK)

    def program(self, name: str, text: str) -> None:
        """A program that comes before the machine's own."""
        file = self.programs / name
        file.write_text(text)
        file.chmod(0o755)

    def use(self, name: str, target: str) -> None:
        """Makes ``name`` the machine's program ``target``; skips the test where it is missing."""
        found = shutil.which(target)
        if found is None:
            pytest.skip(f"{target} is not installed")
        # Not a link: MPICH looks for its other programs beside the one that it was started by.
        self.program(name, f'#!/bin/sh\nexec {found} "$@"\n')

    def forward(self, **more: str) -> None:
        """Writes ``.deepspeed_env``: what DeepSpeed's launchers pass on."""
        first = self.bed.hosts[0]
        variables = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": first.interfaces[0],
            "SMDDP_FABRIC_INTERFACE": first.interfaces[0],
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "CXX": "/bin/false",  # so that DeepSpeed compiles nothing
            **more,
        }
        lines = [f"{name}={value}\n" for name, value in variables.items() if value]
        (self.folder / ".deepspeed_env").write_text("".join(lines))

    def deepspeed(self, launcher: str, launcher_args: str = "") -> str:
        """Starts the ranks by DeepSpeed's launcher on the first host; all output."""
        first = self.bed.hosts[0]
        command = [
            # MPICH passes all variables on, and each host has a name of its own.
            *("env", "-u", "SMDDP_HOST_ID"),
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *("--hostfile", "hostfile", "--launcher", launcher),
            *("--master_addr", first.addresses[0], "--master_port", "29511", "--no_ssh_check"),
            *([f"--launcher_args={launcher_args}"] if launcher_args else []),
            "rank.py",
        ]
        dropped: dict[str, str | None] = dict.fromkeys(
            ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        done = first.run(
            command,
            {**dropped, "PATH": self.path, "HOME": str(self.folder), "DS_ACCELERATOR": "cpu"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,  # what is left then ends with the testbed
        )
        assert done.returncode == 0, done.stdout
        return str(done.stdout)


@pytest.fixture
def cluster(testbed: Callable[..., Testbed], tmp_path: Path) -> Cluster:
    return Cluster(testbed(hosts=2, rate="1gbit"), tmp_path)


def check(cluster: Cluster, said: str) -> None:
    """Ranks 0 and 1 are on the first host, 2 and 3 on the second; bytes crossed between them."""
    names = [int(host.name[-1]) for host in cluster.bed.hosts for _ in range(SLOTS)]
    expected = [number for rank, name in enumerate(names) for number in (rank, name)]
    assert said.count(f"gathered {expected} ['shm + fabric']") == len(names), said


def test_pdsh(cluster: Cluster) -> None:
    cluster.use("pdsh", "pdsh")
    cluster.forward()
    check(cluster, cluster.deepspeed("pdsh"))


def test_open_mpi(cluster: Cluster) -> None:
    cluster.use("mpirun", "mpirun.openmpi")
    cluster.use("ompi_info", "ompi_info")
    # DeepSpeed passes no address to Open MPI's ranks: it asks mpi4py, which is hidden.
    cluster.forward(MASTER_ADDR=cluster.bed.hosts[0].addresses[0])
    network = cluster.bed.hosts[0].interfaces[0]
    check(
        cluster,
        cluster.deepspeed(
            "openmpi",
            f"--allow-run-as-root --mca btl_tcp_if_include {network} "
            f"--mca oob_tcp_if_include {network} --prefix /usr",
        ),
    )


@pytest.mark.parametrize("mpirun", ["mpirun.mpich", os.environ.get("SMDDP_TEST_MPICH", "")])
def test_mpich(cluster: Cluster, mpirun: str) -> None:
    """Debian's, and the one that SMDDP_TEST_MPICH names, such as that of PyPI's package."""
    if not mpirun:
        pytest.skip("SMDDP_TEST_MPICH names no mpirun")
    cluster.use("mpirun", mpirun)
    cluster.forward()
    check(cluster, cluster.deepspeed("mpich", f"-iface {cluster.bed.hosts[0].interfaces[0]}"))


def test_intel_mpi(cluster: Cluster) -> None:
    """The mpirun that SMDDP_TEST_IMPI names, such as that of PyPI's ``impi-rt``."""
    mpirun = os.environ.get("SMDDP_TEST_IMPI")
    if not mpirun:
        pytest.skip("SMDDP_TEST_IMPI names no mpirun")
    cluster.use("mpirun", mpirun)
    cluster.forward()
    check(cluster, cluster.deepspeed("impi", f"-iface {cluster.bed.hosts[0].interfaces[0]}"))


def test_slurm(cluster: Cluster) -> None:
    cluster.program("sinfo", "#!/bin/sh\n")
    srun = (HERE / "srun.py").read_text()
    cluster.program("srun", f"#!{sys.executable}\n{srun}")
    cluster.forward(SIMULATED_SLURM_HOSTS="+".join(host.name for host in cluster.bed.hosts))
    check(cluster, cluster.deepspeed("slurm"))
