"""Runs the training as several processes, with a deadline; no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 2
SECONDS = 400.0  # for all trainings of one call; they take 10 to 100 on two busy cores
_PROGRAM = Path(__file__).with_name("training.py")
_OURS = ("SMDDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "PYTHON", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Interpreter:
    """A Python, and folders that its imports search first."""

    python: Path
    path: tuple[Path, ...] = ()


def train(
    interpreter: Interpreter,
    folder: Path,
    jobs: Sequence[Mapping[str, Any]],
    *,
    beside: bool = True,
) -> tuple[list[dict[str, Any]], str]:
    """The answers of rank 0 (``training.py``), and the error that ended the last training, or "".

    Args:
        interpreter: runs the ranks.
        folder: for the checkpoint, the output of each rank and the answers.
        jobs: ``program`` (default: zero3), ``backend``, ``steps``, ``save_at``, ``load`` of each
            training.
        beside: False: torch loads no backend by an entry point, as if this package were not there.
    """
    answers = [folder / f"answer{number}.json" for number in range(len(jobs))]
    for answer in answers:
        answer.unlink(missing_ok=True)
    common = {
        "program": "zero3",
        "folder": str(folder / "checkpoint"),
        "save_at": None,
        "load": False,
    }
    whole = [
        {**common, "answer": str(answer), "port": _free_port(), **job}
        for answer, job in zip(answers, jobs, strict=True)
    ]
    begun, processes = time.monotonic(), []
    outputs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    try:
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [str(interpreter.python), str(_PROGRAM), json.dumps(whole)],
                        env=_environment(interpreter, rank, beside),
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(processes, begun)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [json.loads(a.read_text(encoding="utf-8")) for a in answers if a.exists()]
    if len(found) == len(jobs):
        return found, ""
    late = time.monotonic() - begun > SECONDS
    return found, f"no end after {SECONDS:.0f} s" if late else reason(outputs)


def reason(outputs: list[Path]) -> str:
    """The error that the output of the ranks ends with."""
    for output in outputs:
        text = output.read_text(encoding="utf-8", errors="replace")
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        errors = [
            line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)
        ]
        if errors:
            error = re.sub(r"^\[rank\d+\]: ?", "", errors[-1])
            return re.sub(r"/\S*/site-packages/", "", error)[:300].rstrip()
    return "a rank ended without an error message"


def _wait(processes: list[subprocess.Popen[bytes]], begun: float) -> None:
    while any(process.poll() is None for process in processes):
        if time.monotonic() - begun > SECONDS:
            return
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(3)  # for the errors of the others
            return
        time.sleep(0.1)


def _environment(interpreter: Interpreter, rank: int, beside: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {
        **kept,
        "PATH": f"{interpreter.python.parent}:{kept.get('PATH', '')}",
        "PYTHONPATH": ":".join(map(str, interpreter.path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({} if beside else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
