"""The rank and the address of a process that ``mpirun`` or ``srun`` started, and its host's name.

torch reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun and
DeepSpeed's own launcher set; DeepSpeed and many scripts read ``LOCAL_RANK``, too. The launchers of
MPI and Slurm set variables of their own. :func:`apply` sets torch's by them. What is set stays.
docs/launchers.md has the table.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from deepspeed_smddp.errors import CommandError

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# DeepSpeed's and torchrun's default.
PORT = 29500
# A Slurm job's port is one of these, by its number: jobs that share a host differ.
_SLURM_PORTS, _FIRST_SLURM_PORT = 10_000, 20_000


class LauncherError(CommandError):
    """The process was started as a rank, and one thing is missing that its variables do not say."""


def host_name() -> str:
    """The name of this host: its identity for smddp if one is set, else its network name."""
    return os.environ.get("SMDDP_HOST_ID") or socket.gethostname()


class _Place(NamedTuple):
    """What a launcher says of one process; ``first_host`` is empty if it does not name it."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    first_host: str = ""
    port: int = PORT


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables to set, by name, so that torch can join; those that ``env`` has are left out.

    Empty if torchrun or DeepSpeed's launcher started the process (``RANK`` is set), or none did.

    Raises:
        LauncherError: a variable of the launcher holds something else than a number; or there are
            several hosts, and nothing names the host of rank 0.
    """
    found = None if "RANK" in env else _place(env)
    if found is None:
        return {}
    address = env.get("MASTER_ADDR") or found.first_host
    if not address and found.local_size == found.size:
        address = "127.0.0.1"
    if not address:
        raise LauncherError(
            f"{found.launcher} started {found.size} ranks on several hosts and does not say which "
            "one has rank 0: set MASTER_ADDR to its name or address on all ranks "
            "(`mpirun -x MASTER_ADDR=...`, or `-genv MASTER_ADDR ...` of MPICH and Intel MPI)"
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = dict(zip(names, (*found[1:5], address, found.port), strict=True))
    return {name: str(value) for name, value in values.items() if not env.get(name)}


def has_all_variables() -> bool:
    """Whether this process has all variables of torch's that a launcher sets."""
    return all(name in os.environ for name in TORCH)


def apply() -> None:
    """Sets the variables that torch reads in this process; call it before the group is made.

    Raises:
        LauncherError: as :func:`variables`.
    """
    os.environ.update(variables(os.environ))


def _place(env: Mapping[str, str]) -> _Place | None:
    # MPI's before Slurm's: in an allocation mpirun starts a daemon on each host by srun, and the
    # ranks inherit what that has told the daemon.
    for read in (_open_mpi, _hydra, _slurm):
        try:
            found = read(env)
        except (KeyError, ValueError, IndexError) as error:
            raise LauncherError(
                f"the variables of the launcher ({read.__name__.strip('_')}) are not complete: "
                f"{error}; set {', '.join(TORCH)} on each rank"
            ) from None
        if found is not None:
            return found
    return None


def _open_mpi(env: Mapping[str, str]) -> _Place | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local, local_size = (int(env[f"OMPI_COMM_WORLD_{name}"]) for name in names)
    return _Place("Open MPI's mpirun", rank, size, local, local_size, _sagemaker_host(env))


def _hydra(env: Mapping[str, str]) -> _Place | None:
    """MPICH and Intel MPI."""
    if "PMI_RANK" not in env or "MPI_LOCALRANKID" not in env:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    rank, size, local, local_size = (int(env[name]) for name in names)
    return _Place("MPICH's mpirun", rank, size, local, local_size)


def _slurm(env: Mapping[str, str]) -> _Place | None:
    # A batch script has SLURM_PROCID, too. Only srun says how many tasks the step has.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    job = int(env.get("SLURM_JOB_ID", "0"))
    return _Place(
        "srun",
        int(env["SLURM_PROCID"]),
        int(env["SLURM_STEP_NUM_TASKS"]),
        int(env["SLURM_LOCALID"]),
        tasks_per_host(env["SLURM_STEP_TASKS_PER_NODE"])[int(env["SLURM_NODEID"])],
        first_host=first_of_hostlist(env["SLURM_STEP_NODELIST"]),
        port=_FIRST_SLURM_PORT + job % _SLURM_PORTS,
    )


def _sagemaker_host(env: Mapping[str, str]) -> str:
    """The first of SageMaker's hosts, on which its mpirun puts rank 0; empty elsewhere."""
    hosts = json.loads(env.get("SM_HOSTS", "[]"))
    return str(min(hosts, key=_number_at_end)) if hosts else ""


def _number_at_end(host: str) -> tuple[str, int]:
    """``("algo-", 10)`` of ``algo-10``, so that it comes after ``algo-9``."""
    name = host.rstrip("0123456789")
    return name, int(host[len(name) :] or 0)


def tasks_per_host(text: str) -> list[int]:
    """``[2, 2, 2, 1]`` of Slurm's ``2(x3),1``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text} is no list of tasks per node")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_of_hostlist(text: str) -> str:
    """``gpu-r1n07`` of Slurm's ``gpu-r[1,3]n[07-12],login2``."""
    first = re.split(r",(?![^\[]*\])", text)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
