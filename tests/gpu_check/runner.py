"""Runs the steps one after another, each in a process of its own and within its limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check import build, machine, report
from gpu_check.step import FAILED, LATE, MISSED, PASSED, RUNNING, SKIPPED, Run, Step, read_result

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
        self.no_gpu = machine.no_gpu() if device == "cuda" else None
        self.gpus = machine.gpu_count() if device == "cuda" else 0

    def run(self) -> int:
        """Runs what has no result yet; returns the exit status of the check."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, step in enumerate(self.steps, 1):
            label = f"[{number}/{len(self.steps)}] {step.name}"
            if not self.again and self._has_result(step):
                print(f"{label}: has its result", flush=True)
                continue
            if time.monotonic() + step.limit + GRACE > self.end:
                print(f"{label}: left for the next run, which goes on from here", flush=True)
                report.write(self.folder)
                return NOT_ALL_YET
            run = Run(step, self.folder, self.device, self.gpus, machine.source())
            why = self._not_here(step)
            result = run.write(SKIPPED, why) if why else self._run(run, label)
            said = f": {result['sentence']}" if result["sentence"] else ""
            print(f"{label}: {result['status']} in {result['seconds']:.0f} s{said}", flush=True)
            report.write(self.folder)
            if step.gpus == 0 and result["status"] in (FAILED, LATE):
                return SOMETHING_FAILED  # nothing can run without the build
        print(f"written: {report.write(self.folder)}", flush=True)
        found = [read_result(self.folder, step) for step in self.steps]
        if any(result is None or result["status"] in (FAILED, LATE) for result in found):
            return SOMETHING_FAILED
        if self.no_gpu is not None:
            print(self.no_gpu, file=sys.stderr)
            return NO_GPU
        return ALL_SHOWN

    def _has_result(self, step: Step) -> bool:
        found = read_result(self.folder, step)
        return (
            found is not None
            and found["status"] in (PASSED, MISSED)
            and found["source"] == machine.source()
            and found["device"] == self.device
            and (step.gpus == 0 or found["gpus"] == self.gpus)
            and (step.gpus > 0 or build.PYTHON.exists())
        )

    def _not_here(self, step: Step) -> str:
        """Why the step can't run on this machine, or nothing."""
        if self.device == "host":
            return "" if step.simulated else "a simulated device can't run it"
        if step.gpus <= self.gpus:
            return ""
        return self.no_gpu or f"it needs {step.gpus} GPUs, and {self.gpus} can be used here"

    def _run(self, run: Run, label: str) -> dict[str, Any]:
        step = run.step
        print(f"{label}: {step.title}, at most {step.limit} s", flush=True)
        (self.folder / f"{step.name}.json").unlink(missing_ok=True)
        # The first step makes the environment in which the others run.
        bare = step.gpus == 0 or self.device == "host"
        python = sys.executable if bare else str(build.PYTHON)
        command = [python, "-m", "gpu_check", "--one", json.dumps(asdict(step))]
        command += ["--out", str(self.folder), "--device", self.device]
        late = False
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
            try:
                process.wait(step.limit)
            except subprocess.TimeoutExpired:
                late = True
                # Python's stacks of the step's process; the ranks' are in the worlds' messages.
                process.send_signal(signal.SIGUSR1)
                time.sleep(1)
            # Whatever is left of the step: its ranks are of its process group or its children.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(GRACE)
        found = read_result(self.folder, step)
        if found is not None:
            run.results, run.goals = found["results"], found["goals"]
        if late:
            said = f"it was not done after {step.limit} s; {step.name}.log has its output"
            return run.write(LATE, said)
        if found is None or found["status"] == RUNNING:
            said = f"its process ended with exit status {process.returncode}; see {step.name}.log"
            return run.write(FAILED, said)
        return found
