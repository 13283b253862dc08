"""One run of a program: its command, its losses, and what the ledger counted."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RANKS = 4
HOSTS = 2
STEPS = 20
CHECKPOINT = 10  # the step whose checkpoint a resumed run loads
REFERENCE = "gloo"
TAIL = 30  # lines of a failed run's log

# bf16 gradients of four ranks are summed in another order, and rounded once by smddp, at each
# addition by Gloo. fp32: the order alone.
TOLERANCE = {"bf16": 5e-4, "fp32": 1e-5}


@dataclass(frozen=True)
class Case:
    """One way to divide the model over the ranks."""

    name: str
    stage: int  # of ZeRO
    tensor: int = 1
    pipe: int = 1
    precision: str = "bf16"
    resume: bool = True

    @property
    def title(self) -> str:
        parts = [f"ZeRO-{self.stage}"]
        parts += [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += [f"PP {self.pipe}"] if self.pipe > 1 else []
        return ", ".join([*parts, self.precision])


@dataclass
class Run:
    """What one run gave."""

    case: str
    deepspeed: str
    backend: str
    resumed: bool
    losses: dict[int, float] = field(default_factory=dict)
    ledger: list[dict[str, object]] = field(default_factory=list)  # rows of rank 0
    command: str = ""
    seconds: float = 0.0

    def calls(self, collective: str, *, own: bool = True) -> int:
        """How often rank 0 called ``collective`` on smddp's own paths, or on the fallback's."""
        return sum(
            int(str(row["calls"]))
            for row in self.ledger
            if row["collective"] == collective
            and str(row["path"]).startswith("fallback:") is not own
        )


class RunError(Exception):
    """A program ended with an error; the message has the end of its log."""


def copied(source: Path, to: Path) -> Path:
    """A copy of a program's checkout without its history: it compiles into its own folder."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(source, to, ignore=shutil.ignore_patterns(".git"))


def start(
    command: Sequence[str], folder: Path, python: Path, env: Mapping[str, str], limit: float
) -> tuple[str, float]:
    """Runs ``command`` with the ranks' environment; its output, and the seconds that it took.

    Raises:
        RunError: it failed or took more than ``limit`` seconds.
    """
    paths = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    full = {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(RANKS),
        "REAL_HOSTS": str(HOSTS),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SMDDP_FABRIC_INTERFACE": "lo",
        **env,
    }
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {limit:.0f} s\n"
        process.returncode = -signal.SIGKILL
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        lines = [line[:200] for line in output.splitlines()]
        raise RunError("\n".join([*lines[-TAIL:], f"exit status {process.returncode}"]))
    return output, time.monotonic() - begin


def losses(output: str, pattern: str) -> dict[int, float]:
    """The loss of each step, by the program's own lines: groups 1 and 2 of ``pattern``."""
    return {int(step): float(loss) for step, loss in re.findall(pattern, output)}


def read_ledger(path: Path) -> list[dict[str, object]]:
    """The rows of one rank's ledger; none without a group of smddp."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    return [{key: row[key] for key in ("collective", "path", "calls", "bytes")} for row in rows]


def check(run: Run, reference: Run, case: Case) -> list[str]:
    """What is wrong with a run over smddp; ``reference`` is the run over Gloo."""
    wrong = []
    wanted = set(range((CHECKPOINT if run.resumed else 0) + 1, STEPS + 1))
    if set(run.losses) != wanted:
        wrong.append(f"it logged the losses of steps {sorted(run.losses)}")
    for step in sorted(wanted & set(run.losses) & set(reference.losses)):
        expected = reference.losses[step]
        if not math.isclose(run.losses[step], expected, rel_tol=TOLERANCE[case.precision]):
            wrong.append(f"step {step}: loss {run.losses[step]:.6f}, Gloo's is {expected:.6f}")
    if set(reference.losses) != set(range(1, STEPS + 1)):
        wrong.append(f"Gloo's run logged the losses of steps {sorted(reference.losses)}")
    elif min(reference.losses[STEPS - 1], reference.losses[STEPS]) > reference.losses[1] - 0.3:
        wrong.append("nothing was learnt")
    for collective in ("all_gather", "all_reduce"):
        if not run.calls(collective):
            wrong.append(f"smddp's ledger has no {collective}")
        if run.calls(collective, own=False):
            wrong.append(f"{collective} went to the fallback")
    if case.stage == 3 and not run.calls("reduce_scatter"):
        wrong.append("smddp's ledger has no reduce_scatter")
    return wrong


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of two runs' losses, over the steps that both have."""
    common = set(run.losses) & set(reference.losses)
    return max(abs(run.losses[s] - reference.losses[s]) / reference.losses[s] for s in common)


def load(path: Path) -> list[Run]:
    """The runs that an earlier :func:`dump` wrote."""
    if not path.exists():
        return []
    found = [Run(**run) for run in json.loads(path.read_text())["runs"]]
    for run in found:
        run.losses = {int(step): loss for step, loss in run.losses.items()}
    return found


def dump(runs: Sequence[Run], facts: Mapping[str, str], path: Path) -> None:
    """Writes everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": facts, "runs": [asdict(r) for r in runs]}, indent=1))
