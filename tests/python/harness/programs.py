"""Whole Python interpreters as ranks, for tests of the start and the end of a process."""

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
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.world import BACKEND, rank_environment

PRELUDE = """
import os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, size, backend = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {backend!r}
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
def join(name="job"):
    prefixed = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size)
"""


@dataclass
class Ended:
    """How one rank ended. ``code`` is None if it was killed at the deadline."""

    rank: int
    code: int | None
    seconds: float
    output: str
    errors: str


class Programs:
    """The same program in one interpreter per rank of ``layout``.

    ``rank``, ``size``, ``backend``, ``store`` and ``join()`` are defined in the program. The store
    lives in this process, so that it stays when a rank ends.
    """

    def __init__(
        self,
        layout: str,
        program: str,
        env: Mapping[str, str] | None = None,
        backend: str = BACKEND,
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="smddp-test-")
        path = Path(self._folder.name) / "program.py"
        path.write_text(PRELUDE.format(backend=backend) + textwrap.dedent(program))
        self._began = time.monotonic()
        self._ended: dict[int, float] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(len(layout)):
            with (
                self._file(rank, "out").open("wb") as out,
                self._file(rank, "err").open("wb") as err,
            ):
                process = subprocess.Popen(
                    [sys.executable, str(path)],
                    env={
                        **os.environ,
                        **rank_environment(layout, rank, self._store.port),
                        "PYTHONUNBUFFERED": "1",
                        "PYTHONWARNINGS": "ignore",
                        **(env or {}),
                    },
                    cwd=self._folder.name,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.processes.append(process)

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def wait_for(self, rank: int, text: str, limit: float = 40) -> None:
        """Waits until the rank has printed ``text``."""
        end = time.monotonic() + limit
        while text not in self._file(rank, "out").read_text():
            errors = self._file(rank, "err").read_text()
            assert self.processes[rank].poll() is None, f"rank {rank} ended:\n{errors}"
            assert time.monotonic() < end, f"rank {rank} never printed {text!r}:\n{errors}"
            time.sleep(0.02)

    def end(self, limit: float = 60) -> list[Ended]:
        """Wait for all processes; kill those that still run at the limit."""
        end = time.monotonic() + limit
        try:
            while len(self._ended) < len(self.processes) and time.monotonic() < end:
                for rank, process in enumerate(self.processes):
                    if rank not in self._ended and process.poll() is not None:
                        self._ended[rank] = time.monotonic() - self._began
                time.sleep(0.02)
        finally:
            self.kill()
        ends = [
            Ended(
                rank,
                process.returncode if rank in self._ended else None,
                self._ended.get(rank, limit),
                self._file(rank, "out").read_text(errors="replace"),
                self._file(rank, "err").read_text(errors="replace"),
            )
            for rank, process in enumerate(self.processes)
        ]
        self._folder.cleanup()
        return ends

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session: its children included
            process.wait()


def run(
    layout: str, program: str, limit: float = 60, env: Mapping[str, str] | None = None
) -> list[Ended]:
    return Programs(layout, program, env).end(limit)


def assert_clean(ends: list[Ended]) -> None:
    """Every rank has exit code 0 before the deadline, and no error on stderr."""
    for end in ends:
        story = f"rank {end.rank}, exit code {end.code}\n{end.output}\n{end.errors}"
        assert end.code is not None, f"still running at the deadline: {story}"
        assert end.code == 0, story
        for word in ("Traceback", "terminate called", "Fatal", "Aborted", "rror:"):
            assert word not in end.errors, story
