"""Runs a Python program as several ranks of one job, with a deadline; no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from harness import server
from harness.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_GRACE = 5.0  # seconds for the other ranks to fail by themselves after one has failed


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


def run(
    program: str,
    size: int,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    imports: str | None = None,
) -> list[str]:
    """Each rank's output; fails with all output if a rank fails or the deadline passes.

    Each rank is an interpreter of its own. With ``imports``, the program's first lines, it is
    forked from one that has executed these lines already.
    """
    envs = _rank_environments(size, env or {})
    if imports is not None:
        job = {"program": textwrap.dedent(program), "size": size, "envs": envs, "limit": timeout}
        answers = server.with_imports(imports).ask(job)
        printed, codes = zip(*((a["output"], a["code"]) for a in answers), strict=True)
        return _checked(list(printed), list(codes), None in codes, timeout)
    ranks: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for environment_ in envs:
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                env=environment_,
                cwd=tempfile.gettempdir(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ranks.append((process, output))
        late = _wait([process for process, _ in ranks], timeout)
    finally:
        for process, _ in ranks:
            _kill(process)
    printed = [_text(output) for _, output in ranks]
    return _checked(printed, [process.returncode for process, _ in ranks], late, timeout)


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


def _checked(printed: list[str], codes: list[int | None], late: bool, timeout: float) -> list[str]:
    if late or any(codes):
        why = f"not done after {timeout} s" if late else f"exit codes {codes}"
        raise AssertionError(
            why + "".join(f"\n--- rank {i}\n{text[-6000:]}" for i, text in enumerate(printed))
        )
    return printed


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            return False  # the exit codes show it
        if now > deadline:
            return True
        time.sleep(0.05)
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the session: compilers and loaders included
    process.wait()


def _text(output: IO[bytes]) -> str:
    with output:
        output.seek(0)
        return output.read().decode(errors="replace")
