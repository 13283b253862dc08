"""compute-sanitizer on the shortest program: two ranks, each collective once."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jobs

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
    """Runs the ranks, each behind the command ``before``; what was said last.

    Raises:
        AssertionError: a rank failed; its output is in the log.
    """
    device = {"SMDDP_DEVICE": "host"} if run.device == "host" else {}
    common = {**os.environ, **device, "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    common["SMDDP_FALLBACK"] = "error"
    environments = [{**common, "RANK": str(rank)} for rank in range(RANKS)]
    with tempfile.TemporaryDirectory() as directory:
        store, output = Path(directory) / "store", Path(directory) / "output"
        command = [*before, sys.executable, "-m", "gpu_check.shortest", str(store), run.device]
        try:
            said = jobs.run(command, machine.ROOT, output, 0.45 * run.step.limit, *environments)
        except jobs.JobError as error:
            raise AssertionError(str(error).splitlines()[-1]) from None
        finally:
            print(output.read_text(errors="replace")[-12000:], flush=True)
    return said.strip().splitlines()[-1]
