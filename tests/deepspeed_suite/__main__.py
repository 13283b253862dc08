"""`python -m tests.deepspeed_suite`: DeepSpeed's own tests over smddp and over Gloo."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

from . import results
from .results import REFERENCE, Outcome
from .run import Suite, summary

# The tests of ZeRO, checkpoints and deepspeed.comm. DeepSpeed moves files between the first two.
PATHS = ("unit/runtime/zero", "unit/v1/zero", "unit/comm", "unit/checkpoint")


def main() -> int:
    """0 if no test fails over smddp alone, else 1."""
    arguments = _arguments()
    suite = Suite(
        source=arguments.source.resolve(),
        folder=arguments.folder.resolve(),
        pytest=arguments.pytest.resolve() if arguments.pytest else None,
        test_limit=arguments.test_limit,
        file_limit=arguments.file_limit,
    )
    if not arguments.go_on or not suite.tests.exists():
        suite.copy_tests()
    files = suite.files(arguments.paths)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no pytest is left
    suite.build_operations()
    done: dict[str, dict[str, Outcome]] = {backend: {} for backend in arguments.backends}
    begin = time.monotonic()
    for number, file in enumerate(files, 1):
        for backend in arguments.backends:
            start = time.monotonic()
            outcomes = suite.run(file, backend, fresh=not arguments.go_on)
            done[backend].update(outcomes)
            groups = ", ".join(f"{n} {name}" for name, n in suite.groups(file, backend).items())
            print(
                f"[{number}/{len(files)}, {(time.monotonic() - begin) / 60:.0f} min] {file} "
                f"{backend}: {summary(outcomes)}; process groups: {groups or 'none'}; "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    results.write(done, suite.folder, _facts(suite))
    print(f"\n{results.table(done)}\n\nFailures:\n\n{results.failures(done)}")
    return _verdict(done)


def _verdict(done: dict[str, dict[str, Outcome]]) -> int:
    alone = [
        (outcome, other)
        for backend in done
        if backend != REFERENCE and REFERENCE in done
        for outcome, other in results.worse(done, backend)
    ]
    print(f"\nFailures that {REFERENCE} does not have: {len(alone)}")
    for outcome, other in alone:
        theirs = other.outcome if other else "not run"
        print(f"  {outcome.test}\n    {outcome.backend}: {outcome.outcome}, {outcome.message}")
        print(f"    {REFERENCE}: {theirs}")
    return 1 if alone else 0


def _facts(suite: Suite) -> dict[str, str]:
    number = suite.source / "version.txt"
    return {
        "date": datetime.date.today().isoformat(),
        "tests of DeepSpeed": number.read_text().strip() if number.exists() else "unknown",
        **{name: version(name) for name in ("deepspeed", "torch", "transformers")},
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.deepspeed_suite", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of DeepSpeed")
    parser.add_argument("--folder", type=Path, default=Path("runs/deepspeed-tests"))
    parser.add_argument("--pytest", type=Path, help="a folder with pytest < 8.4, if .venv has none")
    parser.add_argument("--backends", nargs="+", default=[REFERENCE, "smddp"])
    parser.add_argument("--test-limit", type=float, default=180, help="seconds (%(default)s)")
    parser.add_argument("--file-limit", type=float, default=3600, help="seconds (%(default)s)")
    parser.add_argument("--go-on", action="store_true", help="keep the outcomes of an earlier run")
    parser.add_argument("paths", nargs="*", default=list(PATHS), help="below DeepSpeed's tests/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
