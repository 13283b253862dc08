"""compute-sanitizer on the shortest program: two ranks, each collective once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check import machine
from gpu_check.step import NotHereError, Run

RANKS = 2
ERRORS = 9  # the exit status that compute-sanitizer is told to give


def memcheck(run: Run) -> None:
    """memcheck, then racecheck (shared memory of kernels)."""
    if run.device == "host":
        run.note("without a sanitizer", program(run, []))
        return
    sanitizer = machine.tool("compute-sanitizer")
    if sanitizer is None:
        raise NotHereError("compute-sanitizer is not on the PATH and not in /usr/local/cuda/bin")
    for tool in ("memcheck", "racecheck"):
        run.note(tool, program(run, [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS)]))


def program(run: Run, before: list[str]) -> str:
    """Runs the ranks, each behind the command ``before``; what the first rank said last.

    Raises:
        AssertionError: a rank failed; its output is in the log.
    """
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = str(Path(directory) / "store")
        command = [*before, sys.executable, "-m", "gpu_check.shortest", rendezvous, run.device]
        outputs = [Path(directory) / f"rank{rank}" for rank in range(RANKS)]
        ranks = []
        for rank, output in enumerate(outputs):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            environment |= {"LOCAL_RANK": "0", "SMDDP_FALLBACK": "error"}
            if run.device == "host":
                environment["SMDDP_DEVICE"] = "host"
            with output.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        try:
            statuses = [rank.wait(0.45 * run.step.limit) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            for output in outputs:
                print(f"--- {output.name}\n{output.read_text()[-6000:]}", flush=True)
        said = outputs[0].read_text().strip().splitlines()
    assert statuses == [0] * RANKS, f"exit statuses of the ranks: {statuses}"
    return said[-1] if said else "ended"
