"""The running ranks of one competitor, and the named pipes through which they take turns.

Every rank reads its commands from its own pipe and is blocked in read(2) between turns. So a
library that spins while it waits takes no CPU time from the turns of the others. turns.h holds the
protocol.
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

    from .host_set import NamedHost


class RanksFailed(Exception):
    """A rank ended, gave a wrong result, or did not answer in time."""


class LaunchedRanks:
    """The processes of `ranks` ranks: all get a command together, and all answer it."""

    def __init__(self, name: str, folder: Path, ranks: int) -> None:
        self.name = name
        self.folder = folder
        self.ranks = ranks
        self.hello: dict[str, Any] = {}  # the first answer of rank 0
        self.idle_cpu = 0.0  # CPU seconds that the processes used during the turns of others
        self._processes: list[subprocess.Popen[Any]] = []
        self._commands: list[int] = []
        self._answers: list[int] = []
        folder.mkdir(parents=True)
        for rank in range(ranks):
            for kind in ("commands", "answers"):
                os.mkfifo(folder / f"{rank}.{kind}")
            # Opened for reading and writing, so that opening does not wait for the rank. When this
            # process ends in any way, the ranks read an end of file and exit.
            self._commands.append(os.open(folder / f"{rank}.commands", os.O_RDWR | os.O_CLOEXEC))
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._answers.append(os.open(folder / f"{rank}.answers", flags))

    @property
    def version(self) -> str:
        """Of the library, as rank 0 reports it."""
        return " ".join(str(self.hello.get("version", "")).replace("Version:", "").split())

    def launch(
        self, host: Host | NamedHost, argv: Sequence[str], env: dict[str, str], label: str
    ) -> subprocess.Popen[Any]:
        """Starts a process on `host`; its output goes to the file `label`.log."""
        with (self.folder / f"{label}.log").open("w") as log:
            process = host.popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the driver handles Ctrl-C
            )
        self._processes.append(process)
        return process

    def wait_until_ready(self, timeout: float) -> None:
        """Waits until every rank reads its pipe; then `hello` is set."""
        self.hello = self._collect(timeout)[0]

    def ask(self, command: str, timeout: float) -> list[dict[str, Any]]:
        """Sends the command to every rank and returns all answers."""
        for fd in self._commands:
            os.write(fd, f"{command}\n".encode())
        return self._collect(timeout)

    def ask_for_turn(self, command: str, timeout: float) -> list[dict[str, Any]]:
        """As `ask`, for a command whose answers hold `idle_cpu`; adds it to that of these ranks."""
        answers = self.ask(command, timeout)
        self.idle_cpu += sum(answer["idle_cpu"] for answer in answers)
        return answers

    def _collect(self, timeout: float) -> list[dict[str, Any]]:
        """One line from every rank."""
        texts = [b""] * self.ranks
        poll = select.poll()
        for fd in self._answers:
            poll.register(fd, select.POLLIN)
        missing = dict(zip(self._answers, range(self.ranks), strict=True))
        deadline = time.monotonic() + timeout
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failure(
                    f"no answer from {len(missing)} of {self.ranks} ranks within {timeout:.0f} s"
                )
            for fd, events in poll.poll(min(left, 1.0) * 1000):
                rank = missing[fd]
                if events & select.POLLIN:
                    texts[rank] += os.read(fd, 65536)
                elif events & select.POLLHUP:
                    raise self._failure(f"rank {rank} ended")
                if texts[rank].endswith(b"\n"):
                    poll.unregister(fd)
                    del missing[fd]
            failed = [p.returncode for p in self._processes if p.poll() not in (None, 0)]
            if failed and missing:
                raise self._failure(f"a process ended with status {failed[0]}")
        return [json.loads(text) for text in texts]

    def _failure(self, what: str) -> RanksFailed:
        """The error, with the end of the output of these processes."""
        lines: list[str] = []
        for log in sorted(self.folder.glob("*.log")):
            lines += [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        end = "; its last lines:\n  " + "\n  ".join(lines[-6:]) if lines else ""
        return RanksFailed(f"{self.name}: {what}{end}")

    def close(self) -> None:
        """Tells all processes to exit, and ends those that do not."""
        for fd in self._commands:
            with contextlib.suppress(OSError):
                os.write(fd, b"quit\n")
        deadline = time.monotonic() + 5
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if signal_number is not None and process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal_number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
            deadline = time.monotonic() + 3
        for fd in self._commands + self._answers:
            os.close(fd)
        self._commands, self._answers, self._processes = [], [], []
