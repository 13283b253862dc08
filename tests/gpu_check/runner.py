"""Runs the steps one after another, each in a process of its own and within its limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check import build, machine, report
from gpu_check.step import DONE, FAILED, LATE, RUNNING, SKIPPED, Step, read_result, write_result

# Exit statuses of the check.
ALL_SHOWN, SOMETHING_FAILED, NO_GPU, NOT_ALL_YET = 0, 1, 2, 3
GRACE = 10  # seconds from a step's end to a kill, and what must be left to begin another


class Runner:
    """The steps that are to run, the folder of their results, and the time that is left."""

    def __init__(
        self,
        folder: Path,
        steps: Sequence[Step],
        minutes: float = 1e6,
        again: bool = False,
        device: str = "cuda",
    ) -> None:
        self.folder, self.steps, self.again, self.device = folder, steps, again, device
        self.end = time.monotonic() + 60 * minutes
        self.gpus = 0
        self.no_gpu: str | None = None

    def run(self) -> int:
        """Runs what has no result yet; returns the exit status of the check."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.device == "cuda":
            self.no_gpu = machine.no_gpu()
            self.gpus = machine.gpu_count()
        for number, step in enumerate(self.steps, 1):
            label = f"[{number}/{len(self.steps)}] {step.name}"
            if not self.again and self._is_done(step):
                print(f"{label}: has its result", flush=True)
                continue
            if not self._fits(step):
                print(f"{label}: left for the next run, which goes on from here", flush=True)
                report.write(self.folder)
                return NOT_ALL_YET
            result = self._skip(step) or self._run(step, label)
            said = f": {result['sentence']}" if result["sentence"] else ""
            print(f"{label}: {result['status']} in {result['seconds']:.0f} s{said}", flush=True)
            report.write(self.folder)
            if step.gpus == 0 and result["status"] in (FAILED, LATE):
                return SOMETHING_FAILED  # nothing can run without the build
        print(f"written: {report.write(self.folder)}", flush=True)
        return self._status()

    def _is_done(self, step: Step) -> bool:
        found = read_result(self.folder / f"{step.name}.json")
        return (
            found is not None
            and found["status"] in DONE
            and found["source"] == machine.source()
            and found["device"] == self.device
            and (step.gpus == 0 or found["gpus"] == self.gpus)
            and (step.gpus > 0 or build.PYTHON.exists())
        )

    def _fits(self, step: Step) -> bool:
        return time.monotonic() + step.limit + GRACE <= self.end

    def _skip(self, step: Step) -> dict[str, Any] | None:
        if self.device == "host":
            if step.simulated:
                return None
            return self._result(step, SKIPPED, "a simulated device can't run it", 0.0)
        if step.gpus > self.gpus:
            why = self.no_gpu or f"it needs {step.gpus} GPUs, and {self.gpus} can be used here"
            return self._result(step, SKIPPED, why, 0.0)
        return None

    def _result(self, step: Step, status: str, sentence: str, seconds: float) -> dict[str, Any]:
        path = self.folder / f"{step.name}.json"
        found = read_result(path) if seconds else None
        result = {
            **(found or {"results": {}, "goals": []}),
            "device": self.device,
            "step": step.name,
            "title": step.title,
            "status": status,
            "sentence": sentence,
            "seconds": round(seconds, 1),
            "gpus": self.gpus,
            "source": machine.source(),
        }
        write_result(path, result)
        return result

    def _run(self, step: Step, label: str) -> dict[str, Any]:
        print(f"{label}: {step.title}, at most {step.limit} s", flush=True)
        (self.folder / f"{step.name}.json").unlink(missing_ok=True)
        began = time.monotonic()
        # The first step makes the environment in which the others run.
        bare = step.gpus == 0 or self.device == "host"
        python = sys.executable if bare else str(build.PYTHON)
        command = [python, "-m", "gpu_check", "--one", step.name, "--out", str(self.folder)]
        command += ["--device", self.device, "--limit", str(step.limit)]
        with (self.folder / f"{step.name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=machine.ROOT,
                env=build.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = not self._ends(process, step.limit)
            _kill(process)
        seconds = time.monotonic() - began
        found = read_result(self.folder / f"{step.name}.json")
        if late:
            said = f"it was not done after {step.limit} s; {step.name}.log has its output"
            return self._result(step, LATE, said, seconds)
        if found is None or found["status"] == RUNNING:
            said = f"its process ended with exit status {process.returncode}; see {step.name}.log"
            return self._result(step, FAILED, said, seconds)
        return found

    def _ends(self, process: subprocess.Popen[bytes], limit: int) -> bool:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            # Python's stacks of the step's process; the ranks' are in the worlds' messages.
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            return False
        return True

    def _status(self) -> int:
        found = [read_result(self.folder / f"{step.name}.json") for step in self.steps]
        if any(result is None or result["status"] in (FAILED, LATE) for result in found):
            return SOMETHING_FAILED
        if self.no_gpu is not None:
            print(self.no_gpu, file=sys.stderr)
            return NO_GPU
        return ALL_SHOWN


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of the step: its ranks are of its process group or its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE)
