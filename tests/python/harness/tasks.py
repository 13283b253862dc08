"""Two tasks as a launcher that is not installed would start them: by their variables."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import ranks
from harness.ports import free_port


def of_slurm(task: int) -> dict[str, str]:
    """The variables that srun sets, on two hosts by name that are this one."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(task),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,other",
    }


def run(
    command: list[str],
    of_task: Callable[[int], dict[str, str]],
    *,
    timeout: float,
    stderr: int | None = subprocess.STDOUT,
) -> tuple[list[str], list[int]]:
    """The outputs and exit statuses of two tasks, each with its variables, as two hosts."""
    port = str(free_port())
    tasks = [
        subprocess.Popen(
            command,
            env=ranks.environment(**of_task(task), SMDDP_HOST_ID=f"host{task}", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for task in range(2)
    ]
    try:
        said = [task.communicate(timeout=timeout)[0] for task in tasks]
        return said, [task.returncode for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
