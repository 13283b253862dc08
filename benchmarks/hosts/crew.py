"""The processes of one competitor, and the named pipes that make them take turns.

Every rank reads its commands from a pipe of its own and is blocked in read(2) between turns, so a
library that spins while it waits takes no CPU from the others' turns. turns.h holds the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.testbed import Host

    from .field import Part


class CrewFailed(Exception):
    """A rank ended, or did not answer in time."""


class Crew:
    """`ranks` processes that are asked together and answer together."""

    def __init__(self, name: str, folder: Path, ranks: int) -> None:
        self.name = name
        self.folder = folder
        self.ranks = ranks
        self.version = ""
        self.idle_cpu = 0.0  # seconds that its processes used in others' turns
        self._processes: list[subprocess.Popen[Any]] = []
        self._commands: list[int] = []
        self._answers: list[int] = []
        folder.mkdir(parents=True)
        for rank in range(ranks):
            for kind in ("commands", "answers"):
                os.mkfifo(folder / f"{rank}.{kind}")
            # Read and write: opening must not wait for the rank. When this process ends, however
            # it ends, the ranks read an end of file and leave.
            self._commands.append(os.open(folder / f"{rank}.commands", os.O_RDWR | os.O_CLOEXEC))
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._answers.append(os.open(folder / f"{rank}.answers", flags))

    def launch(
        self, host: Host | Part, argv: Sequence[str], env: dict[str, str], label: str
    ) -> subprocess.Popen[Any]:
        """Starts a process on `host`; its output goes to the file `label`.log."""
        with (self.folder / f"{label}.log").open("w") as log:
            process = host.popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the driver's business
            )
        self._processes.append(process)
        return process

    def wait_until_ready(self, timeout: float) -> dict[str, Any]:
        """What rank 0 says when all are there."""
        first = self._collect(timeout)[0]
        told = str(first.get("version", ""))
        self.version = " ".join(told.replace("Version:", "").split())
        return first

    def ask(self, command: str, timeout: float) -> list[dict[str, Any]]:
        """Gives every rank the command and returns all answers."""
        for fd in self._commands:
            os.write(fd, f"{command}\n".encode())
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[dict[str, Any]]:
        texts = [b""] * self.ranks
        poll = select.poll()
        for fd in self._answers:
            poll.register(fd, select.POLLIN)
        missing = dict(zip(self._answers, range(self.ranks), strict=True))
        deadline = time.monotonic() + timeout
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CrewFailed(
                    f"{self.name}: no answer from {len(missing)} of {self.ranks} ranks within "
                    f"{timeout:.0f} s{self._last_words()}"
                )
            for fd, events in poll.poll(min(left, 1.0) * 1000):
                rank = missing[fd]
                if events & select.POLLIN:
                    texts[rank] += os.read(fd, 65536)
                elif events & select.POLLHUP:
                    raise CrewFailed(f"{self.name}: rank {rank} ended{self._last_words()}")
                if texts[rank].endswith(b"\n"):
                    poll.unregister(fd)
                    del missing[fd]
            failed = [p.returncode for p in self._processes if p.poll() not in (None, 0)]
            if failed and missing:
                raise CrewFailed(
                    f"{self.name}: a process ended with status {failed[0]}{self._last_words()}"
                )
        return [json.loads(text) for text in texts]

    def _last_words(self) -> str:
        """The end of what its processes printed, for the error message."""
        lines: list[str] = []
        for log in sorted(self.folder.glob("*.log")):
            lines += [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "; its last lines:\n  " + "\n  ".join(lines[-6:]) if lines else ""

    def close(self) -> None:
        """Asks all to leave, and ends those that don't."""
        for fd in self._commands:
            with contextlib.suppress(OSError):
                os.write(fd, b"quit\n")
        patience = time.monotonic() + 5
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if sign is not None and process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, sign)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, patience - time.monotonic()))
            patience = time.monotonic() + 3
        for fd in self._commands + self._answers:
            os.close(fd)
        self._commands, self._answers, self._processes = [], [], []
