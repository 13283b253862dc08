"""The command line: ``make gpu-check`` calls it."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from gpu_check import machine
from gpu_check.catalogue import STEPS, by_name
from gpu_check.runner import Runner
from gpu_check.step import FAILED, LONGEST, SKIPPED, NotHereError, Run, Step


def run_one(step: Step, folder: Path, device: str) -> int:
    """Runs one step in this process and writes its result."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gpus = machine.gpu_count() if device == "cuda" and step.gpus > 0 else 0
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(step, folder, device, gpus, machine.source())
    module, function = step.function.split(":")
    try:
        called = getattr(importlib.import_module(f"gpu_check.{module}"), function)
        called(run, *step.arguments)
    except NotHereError as reason:
        run.write(SKIPPED, str(reason))
        return 0
    except BaseException as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [type(error).__name__]
        run.write(FAILED, f"{said[0][:300]} ({step.name}.log has all of it)")
        return 1
    run.end()
    return 0


def main(arguments: list[str]) -> int:
    """Runs all steps, or those that are named."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("steps", nargs="*", help="run only these; default: all")
    parser.add_argument("--out", type=Path, default=machine.ROOT / "runs" / "gpu-check")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no step that may take longer than is left"
    )
    parser.add_argument(
        "--limit", type=int, default=LONGEST, help="no step takes longer than so many seconds"
    )
    parser.add_argument("--again", action="store_true", help="also what has its result already")
    parser.add_argument("--list", action="store_true", help="name the steps and their limits")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument(
        "--device",
        choices=("cuda", "host"),
        default="cuda",
        help="host: threads simulate a device, for the logic of the steps",
    )
    given = parser.parse_args(arguments)
    if given.one:
        status = run_one(Step(**json.loads(given.one)), given.out, given.device)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a thread that a failed step left in the driver would hold up the end
    if given.list:
        for step in STEPS:
            print(f"{step.name:<14} {step.limit:>4} s  {step.title}")
        return 0
    named = [by_name(name) for name in given.steps] or STEPS
    chosen = [step.at_most(given.limit) for step in named]
    again = given.again or bool(given.steps)
    return Runner(given.out, chosen, given.minutes, again, given.device).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
