"""What the checks of other projects' code share: processes with a deadline, and a table."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 3.0  # seconds that the other processes have for their own errors when one has failed
TAIL = 30  # lines of a failed job's output


class JobError(Exception):
    """A job failed or took too long; the message has the end of its output."""


def run(
    command: Sequence[str], folder: Path, log: Path, limit: float, *envs: Mapping[str, str]
) -> str:
    """Runs ``command`` in ``folder``, side by side in each of ``envs``; what it wrote to ``log``.

    At the end no process is left that they started, in whichever process group.

    Raises:
        JobError: one failed, or ``limit`` seconds have passed.
    """
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for env in envs
        ]
    codes: list[int | None] = [None] * len(envs)
    failed, end = False, time.monotonic() + limit
    try:
        while None in codes and time.monotonic() < end:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
            if any(codes) and not failed:
                failed, end = True, min(end, time.monotonic() + GRACE)
    finally:
        for process in processes:
            end_session(process.pid)
            process.wait()
    text = log.read_text(errors="replace")
    if any(codes) or None in codes:
        status = next(filter(None, codes), None)
        why = f"no end after {limit:.0f} s" if status is None else f"exit status {status}"
        raise JobError("\n".join([*(line[:200] for line in text.splitlines()[-TAIL:]), why]))
    return text


def end_session(leader: int) -> None:
    """Kills all processes of a session: ranks, fork servers, compilers."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"
