"""Runs a Python program as several ranks of one job, with a deadline; no process is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

from harness import programs
from harness.ports import free_port

GRACE = 5.0  # seconds that the other ranks have to fail by themselves once one has failed
ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without a launcher's or smddp's variables, and on loopback."""
    dropped = ("SMDDP_", "ACCELERATE_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env.update(
        {
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
            "GLOO_SOCKET_IFNAME": "lo",
            "SMDDP_FABRIC_INTERFACE": "lo",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **changes,
        }
    )
    return env


def python(program: str, timeout: float = 60, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs one program outside any job; the caller checks its exit status."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment(**changes),
        cwd=tempfile.gettempdir(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
    """Starts an interpreter outside any job, whose output is one stream; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(**changes),
        cwd=tempfile.gettempdir(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    program: str,
    size: int,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    imports: str = "import torch, torch.distributed",
) -> list[str]:
    """Each rank's output; fails with all output if a rank fails or the deadline passes.

    The ranks are forked from a process that has executed ``imports``, the program's first lines.
    """
    envs = _rank_environments(size, env or {})
    started = programs.Started(textwrap.dedent(program), envs, imports, merged=True)
    ends = started.end(timeout, GRACE)
    printed = [end.output for end in ends]
    codes = [end.code for end in ends]
    if any(code != 0 for code in codes):
        why = f"not done after {timeout} s" if None in codes else f"exit codes {codes}"
        raise AssertionError(
            why + "".join(f"\n--- rank {i}\n{text[-6000:]}" for i, text in enumerate(printed))
        )
    return printed


def _rank_environments(size: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **env,
        )
        for rank in range(size)
    ]
