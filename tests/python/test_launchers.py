"""Ranks that mpirun or srun started: the variables that are read.

Real launchers run in tests/launchers, and smddp's doctor by each in test_doctor_launched.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.distributed import launchers
from harness import tasks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711123",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07,11-12]",
}


def joined(rank: int, size: int, local: tuple[int, int], address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


# ---- the table


def test_sagemakers_hosts_are_sorted_by_their_number() -> None:
    env = {**OPEN_MPI, "SM_HOSTS": json.dumps(["algo-10", "algo-2"])}
    assert launchers.variables(env) == joined(5, 8, (1, 4), "algo-2", 29500)


def test_what_is_set_stays() -> None:
    env = {**OPEN_MPI, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert launchers.variables(env) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert launchers.variables({**OPEN_MPI, "RANK": "0"}) == {}


TORCHRUN = joined(3, 4, (1, 2), "head", 29500)
BY_LAUNCHER = {
    "torchrun": (TORCHRUN, {}),
    "Open MPI": ({**OPEN_MPI, "MASTER_ADDR": "head"}, joined(5, 8, (1, 4), "head", 29500)),
    "MPICH": (MPICH, joined(1, 2, (1, 2), "127.0.0.1", 29500)),
    "srun": (SLURM, joined(6, 8, (0, 2), "gpu07", 21123)),
}
# The outer one, if there is one, starts the inner one's agent or daemon on each host.
PAIRS = [
    *(("", launcher) for launcher in BY_LAUNCHER),
    ("srun", "torchrun"),
    ("Open MPI", "torchrun"),
    ("MPICH", "torchrun"),
    ("srun", "Open MPI"),
    ("srun", "MPICH"),
]


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_of_two_launchers_the_inner_one_counts(outer: str, inner: str) -> None:
    # The daemon of this host is the first of two of its step.
    daemon = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    daemon["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    around = {**SLURM, **daemon} if outer == "srun" else BY_LAUNCHER.get(outer, [{}])[0]
    given, wanted = BY_LAUNCHER[inner]
    env = {**around, **given}
    assert {**launchers.variables(env), **given} == {**wanted, **given}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        # sbatch's script: no step, so no rank.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"},
    ],
)
def test_a_process_that_no_launcher_started_is_left_alone(env: dict[str, str]) -> None:
    assert launchers.variables(env) == {}


def test_several_hosts_without_an_address_are_one_sentence() -> None:
    with pytest.raises(launchers.LauncherError, match=r"8 ranks on several hosts .* MASTER_ADDR"):
        launchers.variables(OPEN_MPI)


@pytest.mark.parametrize("broken", [{"OMPI_COMM_WORLD_SIZE": "many"}, {"OMPI_COMM_WORLD_SIZE": ""}])
def test_variables_that_are_no_numbers_are_one_sentence(broken: dict[str, str]) -> None:
    with pytest.raises(launchers.LauncherError, match=r"open_mpi.*set RANK, WORLD_SIZE"):
        launchers.variables({**OPEN_MPI, **broken})


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("node3", "node3"),
        ("node3,login2", "node3"),
        ("gpu[07,11-12]", "gpu07"),
        ("gpu-r[1,3]n[07-12],login2", "gpu-r1n07"),
        ("a[1-2]-ib,b", "a1-ib"),
    ],
)
def test_the_first_host_of_slurms_list(text: str, first: str) -> None:
    assert launchers.first_of_hostlist(text) == first


def test_slurms_tasks_per_host() -> None:
    assert launchers.tasks_per_host("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="2x3"):
        launchers.tasks_per_host("2x3")


# ---- DeepSpeed


@pytest.fixture
def started_by_mpirun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*launchers.TORCH, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    yield


def test_deepspeed_may_ask_mpi_where_rank_0_is(
    started_by_mpirun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm_backend, "find_spec", lambda name: object())
    comm_backend.set_launcher_variables()
    assert "RANK" not in os.environ  # DeepSpeed's own discovery follows
    monkeypatch.setattr(comm_backend, "find_spec", lambda name: None)
    with pytest.raises(launchers.LauncherError, match="MASTER_ADDR"):
        comm_backend.set_launcher_variables()


# ---- ranks with a launcher's variables


GATHER = """
import os, torch, torch.distributed as dist
dist.init_process_group("smddp")
out = torch.empty(dist.get_world_size(), dtype=torch.int64)
dist.all_gather_into_tensor(out, torch.tensor([int(os.environ["LOCAL_RANK"])]))
print("gathered", out.tolist(), flush=True)
dist.destroy_process_group()
"""


def run_tasks(command: list[str], of_task: Callable[[int], dict[str, str]]) -> list[str]:
    """The output of two tasks, each with its launcher's variables, as two hosts."""
    said, statuses = tasks.run(command, of_task, timeout=240)
    assert statuses == [0, 0], "\n".join(said)
    return said


def test_a_step_of_slurm() -> None:
    """Two tasks with the variables that srun sets, on two hosts by name that are this one."""
    smddp = str(Path(sys.executable).parent / "smddp")
    for said in run_tasks([smddp, "exec", sys.executable, "-c", GATHER], tasks.of_slurm):
        assert "gathered [0, 0]" in said


def test_a_script_for_the_closed_library_under_sagemakers_mpirun() -> None:
    """The import of such scripts, before torch's, and the variables that SageMaker's job sets."""

    def variables(task: int) -> dict[str, str]:
        return {
            "OMPI_COMM_WORLD_RANK": str(task),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "SM_HOSTS": '["other-2", "localhost"]',
        }

    script = "import smdistributed.dataparallel.torch.torch_smddp" + GATHER
    for said in run_tasks([sys.executable, "-c", script], variables):
        assert "gathered [0, 0]" in said
