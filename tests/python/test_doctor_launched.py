"""``smddp doctor`` under each launcher, by the commands of docs/doctor.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ranks
from harness import tasks
from harness.ports import free_port

BESIDE = Path(sys.executable).parent
DOCTOR = [str(BESIDE / "smddp"), "doctor", "--json", "-"]
PROGRAMS = {
    "torchrun": [str(BESIDE / "torchrun"), "--nproc_per_node", "2", "--no-python"],
    "deepspeed": [str(BESIDE / "deepspeed"), "--num_gpus", "2", "--no_python"],
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpirun.mpich", "-n", "2"],
}


def report_in(said: str) -> dict[str, Any]:
    """Rank 0's report among what a launcher prints."""
    lines = said.splitlines()
    starts = [number for number, line in enumerate(lines) if line == "{"]
    assert len(starts) == 1, said
    found: dict[str, Any] = json.loads(
        "\n".join(lines[starts[0] : lines.index("}", starts[0]) + 1])
    )
    return found


def checked(report: dict[str, Any]) -> None:
    assert report["size"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["status"] in (0, 3), report["deviations"]  # the machine may be busy
    assert {row["name"] for row in report["deviations"]} <= {"slow rank"}
    assert len(report["measured"]["cores"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", PROGRAMS)
def test_by_a_launcher(launcher: str) -> None:
    command = PROGRAMS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    port = str(free_port())
    more = [f"--master_port={port}"] if launcher in ("torchrun", "deepspeed") else []
    done = subprocess.run(
        [*command, *more, *DOCTOR],
        env=ranks.environment(MASTER_PORT=port),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = report_in(done.stdout)
    checked(report)
    # A launcher gives every failure a status of its own.
    assert bool(done.returncode) == bool(report["status"]), done.stdout + done.stderr


@pytest.mark.slow
def test_by_srun() -> None:
    """Two tasks with the variables that srun sets, on two hosts by name that are this one."""
    said, statuses = tasks.run(DOCTOR, tasks.of_slurm, timeout=200, stderr=None)
    report = report_in(said[0])
    checked(report)
    assert said[1] == ""
    assert statuses == [report["status"]] * 2
    (link,) = report["measured"]["links"]
    assert link["hosts"] == ["host0", "host1"] and link["bytes_per_second"] > 0
