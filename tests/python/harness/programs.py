"""Whole programs as ranks, for tests of the first group and of the end of a process.

They are forked from a process that has imported torch, and end like interpreters.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness import server
from harness.world import rank_environment

IMPORTS = "import torch, torch.distributed"
PRELUDE = """
import os, sys, time, warnings
from datetime import timedelta
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
torch.set_num_threads(1)
rank, size, backend = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "smddp"
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
def join(name="job"):
    prefixed = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size)
def limit(seconds):  # of the operations that follow, not of the start of a busy machine
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
"""


@dataclass
class Ended:
    """How one rank ended. ``code`` is None if it was killed at the deadline."""

    rank: int
    code: int | None
    seconds: float
    output: str
    errors: str


class Rank:
    """The process of one rank; as ``subprocess.Popen``, though another process is its parent."""

    def __init__(self, parent: server.Server, pid: int) -> None:
        self._parent, self.pid = parent, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask({"ended": [self.pid]}).get(str(self.pid))
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


class Started:
    """A program in one process per environment of ``envs``.

    ``imports``: what the process that they are forked from has executed. ``merged``: output and
    errors are one stream, the output.
    """

    def __init__(
        self, program: str, envs: Sequence[Mapping[str, str]], imports: str, merged: bool = False
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smddp-test-")
        self._began = time.monotonic()
        self._ended: dict[int, float] = {}
        job = {"start": program, "envs": envs, "folder": self._folder.name, "merged": merged}
        parent = server.with_imports(imports)
        self.processes = [Rank(parent, pid) for pid in parent.ask(job)]

    def _read(self, rank: int, kind: str) -> str:
        path = Path(self._folder.name) / f"{rank}.{kind}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, rank: int, text: str, limit: float = 40) -> None:
        """Waits until the rank has printed ``text``."""
        end = time.monotonic() + limit
        while text not in self._read(rank, "out"):
            errors = self._read(rank, "err")
            assert self.processes[rank].poll() is None, f"rank {rank} ended:\n{errors}"
            assert time.monotonic() < end, f"rank {rank} never printed {text!r}:\n{errors}"
            time.sleep(0.02)

    def end(self, limit: float = 60, grace: float | None = None) -> list[Ended]:
        """Wait for all processes; kill those that still run at the limit.

        With ``grace``, the others have that many seconds once one has failed.
        """
        end = time.monotonic() + limit
        try:
            while len(self._ended) < len(self.processes) and time.monotonic() < end:
                for rank, process in enumerate(self.processes):
                    if rank not in self._ended and process.poll() is not None:
                        self._ended[rank] = time.monotonic() - self._began
                        if process.returncode and grace is not None:
                            end = min(end, time.monotonic() + grace)
                time.sleep(0.02)
        finally:
            self.kill()
        ends = [
            Ended(
                rank,
                process.returncode if rank in self._ended else None,
                self._ended.get(rank, limit),
                self._read(rank, "out"),
                self._read(rank, "err"),
            )
            for rank, process in enumerate(self.processes)
        ]
        self._folder.cleanup()
        return ends

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session: its children included
            process.wait()


class Programs(Started):
    """The same program in one process per rank of ``layout``.

    ``rank``, ``size``, ``backend``, ``store`` and ``join()`` are defined in the program. The store
    lives in this process, so that it stays when a rank ends. ``imports`` is nothing if ``env`` has
    variables that the import reads.
    """

    def __init__(
        self,
        layout: str,
        program: str,
        env: Mapping[str, str] | None = None,
        imports: str = IMPORTS,
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        envs = [
            {**os.environ, **rank_environment(layout, rank, self._store.port), **(env or {})}
            for rank in range(len(layout))
        ]
        super().__init__(PRELUDE + textwrap.dedent(program), envs, imports)


def run(
    layout: str,
    program: str,
    limit: float = 60,
    env: Mapping[str, str] | None = None,
    imports: str = IMPORTS,
) -> list[Ended]:
    return Programs(layout, program, env, imports=imports).end(limit)


def assert_clean(ends: list[Ended]) -> None:
    """Every rank has exit code 0 before the deadline, and no error on stderr."""
    for end in ends:
        story = f"rank {end.rank}, exit code {end.code}\n{end.output}\n{end.errors}"
        assert end.code is not None, f"still running at the deadline: {story}"
        assert end.code == 0, story
        for word in ("Traceback", "terminate called", "Fatal", "Aborted", "rror:"):
            assert word not in end.errors, story
