"""A stand-in for Slurm's srun: starts tasks by ssh, with the variables that srun sets.

srun -n TASKS --export=ALL,NAME=VALUE... PROGRAM ARGUMENTS...

The variable SIMULATED_SLURM_HOSTS of --export lists the hosts, each of which gets an equal share.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys


def task_variables(hosts: list[str], task: int, tasks: int) -> dict[str, str]:
    """The variables of one task of a step with a block of tasks on each host."""
    per_host = tasks // len(hosts)
    return {
        "SLURM_JOB_ID": "42",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_LOCALID": str(task % per_host),
        "SLURM_NODEID": str(task // per_host),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{len(hosts)})",
        "SLURM_STEP_NODELIST": ",".join(hosts),
    }


def main() -> int:
    """The exit status: that of the first task that failed, or 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--export", default="ALL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    exported = dict(pair.split("=", 1) for pair in args.export.split(",")[1:] if "=" in pair)
    # srun splits at commas; a list is passed with other separators.
    hosts = exported.pop("SIMULATED_SLURM_HOSTS").split("+")
    tasks = []
    for task in range(args.n):
        variables = {**exported, **task_variables(hosts, task, args.n)}
        exports = "".join(f"export {name}={shlex.quote(v)}; " for name, v in variables.items())
        host = hosts[int(variables["SLURM_NODEID"])]
        tasks.append(subprocess.Popen(["ssh", host, exports + shlex.join(args.command)]))
    return next((status for task in tasks if (status := task.wait())), 0)


if __name__ == "__main__":
    sys.exit(main())
