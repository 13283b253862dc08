"""Ranks of one program on the hosts of a testbed; a command or an answer is one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import Testbed, start_ranks


class LineRanks:
    """One process per rank, which ends when its standard input does."""

    def __init__(
        self, bed: Testbed, program: Path, per_host: int, cwd: Path, **env: str | None
    ) -> None:
        self._errors = cwd / "errors"
        with self._errors.open("w") as errors:
            self.processes = start_ranks(
                bed,
                [sys.executable, str(program)],
                per_host,
                env,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def tell(self, *command: Any, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].stdin.write(json.dumps(command) + "\n")
            self.processes[rank].stdin.flush()

    def answer(self, rank: int) -> Any:
        line = self.processes[rank].stdout.readline()
        if not line:
            pytest.fail(f"rank {rank} ended: {self._errors.read_text()[-6000:]}")
        return json.loads(line)

    def answers(self) -> list[Any]:
        return [self.answer(rank) for rank in range(len(self.processes))]

    def all(self, *command: Any) -> list[Any]:
        """What each rank answers to a command."""
        self.tell(*command)
        return self.answers()

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            assert process.wait(timeout=60) == 0, self._errors.read_text()[-6000:]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
