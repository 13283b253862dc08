"""The short form, for each change: one older DeepSpeed beside the one of .venv, with its torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from .phases import EQUAL
from .ranks import Interpreter, train

VERSION = "0.16.9"  # the oldest minor version that is supported
STEPS = 2


def main(folder: Path) -> int:
    """0 if the losses over Gloo and over smddp are equal, and parameters come without copies."""
    begun = time.monotonic()
    place = folder / f"deepspeed-{VERSION}"
    if not (place / "deepspeed").exists():
        shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-deps", "--no-build-isolation", f"--target={place}"]
        subprocess.run([*command, f"deepspeed=={VERSION}"], check=True)
    work = folder / "short"
    work.mkdir(parents=True, exist_ok=True)
    interpreter = Interpreter(Path(sys.executable), (place, Path(__file__).resolve().parents[2]))
    jobs = [{"backend": backend, "steps": STEPS} for backend in ("gloo", "smddp")]
    answers, error = train(interpreter, work, jobs)
    if error:
        print(f"DeepSpeed {VERSION}: {error}; see {work}")
        return 1
    beside, ours = answers
    if ours["losses"] != beside["losses"]:
        print(f"DeepSpeed {VERSION}: losses {ours['losses']} in place of {beside['losses']}")
        return 1
    if not ours["features"]["gather"]:
        print(f"DeepSpeed {VERSION}: its own gathers ran in place of smddp's")
        return 1
    print(f"DeepSpeed {VERSION}: losses {EQUAL} to Gloo's; {time.monotonic() - begun:.0f} s")
    return 0
