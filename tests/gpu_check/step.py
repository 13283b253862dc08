"""A step of the check, and what it writes down while it runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PASSED, MISSED, FAILED, LATE, SKIPPED = "passed", "missed a goal", "failed", "late", "skipped"
RUNNING = "running"
LONGEST = 470  # seconds of one step at most, with what its end takes


class NotHereError(Exception):
    """The machine lacks what the step needs; the message is one sentence."""


@dataclass(frozen=True)
class Step:
    """``function`` is ``module:name`` in this package.

    It is called with a :class:`Run` and ``arguments``.
    """

    name: str
    title: str
    function: str
    limit: int  # seconds
    gpus: int = 1  # the least number; 0: runs without a GPU
    simulated: bool = True  # its functions also run on the device that threads simulate
    arguments: tuple[Any, ...] = ()

    def at_most(self, seconds: int) -> Step:
        """The step with a limit of no more than ``seconds``."""
        return replace(self, limit=min(self.limit, seconds))


@dataclass
class Run:
    """One run of a step: its device, and its results, which are on disk from the first on."""

    step: Step
    folder: Path
    device: str  # "cuda", or "host": threads that simulate a device
    gpus: int  # 0 on "host"
    source: str = "unknown"
    results: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    @property
    def small(self) -> bool:
        """Whether sizes are to fit the simulated device, which is slow and in host memory."""
        return self.device != "cuda"

    def note(self, name: str, value: Any) -> None:
        """Keeps a result; what was noted survives if the step is killed later."""
        self.results[name] = value
        print(f"{name}: {value}", flush=True)
        self.write(RUNNING, "")

    def goal(self, what: str, met: bool, value: str) -> None:
        """A figure that this project promises. A goal that is missed does not end the step."""
        self.goals.append({"what": what, "met": bool(met), "value": value})
        print(f"goal {'met' if met else 'MISSED'}: {what}: {value}", flush=True)
        self.write(RUNNING, "")

    def end(self) -> None:
        """The step came to its end."""
        missed = [goal for goal in self.goals if not goal["met"]]
        said = "; ".join(f"{goal['what']}: {goal['value']}" for goal in missed)
        self.write(MISSED if missed else PASSED, said)

    def write(self, status: str, sentence: str) -> dict[str, Any]:
        """Replaces the step's file, which holds the old or the new content at any time."""
        result = {
            "step": self.step.name,
            "title": self.step.title,
            "status": status,
            "sentence": sentence,
            "seconds": round(time.time() - self.began, 1),
            "began": time.strftime("%F %T", time.gmtime(self.began)),
            "device": self.device,
            "gpus": self.gpus,
            "source": self.source,
            "results": self.results,
            "goals": self.goals,
        }
        path = self.folder / f"{self.step.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1, default=str) + "\n")
        partial.replace(path)
        return result


def read_result(folder: Path, step: Step) -> dict[str, Any] | None:
    """What a run of the step has written, or None."""
    try:
        found = json.loads((folder / f"{step.name}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
