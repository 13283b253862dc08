"""`python -m tests.deepspeed_suite`: DeepSpeed's own unit tests over smddp and over Gloo, compared.

A test that crashes or takes too long does not stop the others: pytest-timeout ends the process that
runs it, and pytest-xdist starts another.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests import jobs

from . import outcomes
from .outcomes import REFERENCE, Outcome

# The tests of ZeRO, checkpoints and deepspeed.comm. DeepSpeed moves files between the first two.
PATHS = ("unit/runtime/zero", "unit/v1/zero", "unit/comm", "unit/checkpoint")
_MOST_RANKS = 4  # DeepSpeed's tests of more are skipped
_BUILD = """
from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "PinMemoryBuilder"):
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:
        print("DeepSpeed does not build", name, error, flush=True)
"""


class Suite:
    """A copy of the tests: in the checkout they would test the checkout's own package."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given = arguments
        self.folder = arguments.folder.resolve()
        self.tests = self.folder / "tests"
        self.extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", self.folder / "extensions"))
        if not (arguments.go_on and self.tests.exists()):
            if not (arguments.source / "tests/unit/common.py").exists():
                raise SystemExit(f"{arguments.source} is no checkout of DeepSpeed")
            shutil.rmtree(self.tests, ignore_errors=True)
            shutil.copytree(arguments.source / "tests", self.tests)
        for lock in self.extensions.rglob("lock"):
            lock.unlink()  # of a killed compilation; the next one would wait for it for ever
        # What DeepSpeed would otherwise compile during a test.
        environment = self.environment("none", REFERENCE)
        subprocess.run([sys.executable, "-c", _BUILD], env=environment, check=True)

    def files(self) -> list[str]:
        """The test files below the paths, relative to DeepSpeed's folder "tests"."""
        found: list[Path] = []
        for path in self.given.paths:
            if not (self.tests / path).exists():
                raise SystemExit(f"DeepSpeed's tests have no {path}")
            whole = (self.tests / path).is_dir()
            found += (
                sorted((self.tests / path).rglob("test_*.py")) if whole else [self.tests / path]
            )
        return list(dict.fromkeys(str(path.relative_to(self.tests)) for path in found))

    def run(self, file: str, backend: str) -> list[Outcome]:
        """The outcome of each test of ``file``; with --go-on, of an earlier run if it is there."""
        report = self.path(file, backend, ".xml")
        if not (self.given.go_on and report.exists()):
            report.unlink(missing_ok=True)
            self.path(file, backend, ".groups").unlink(missing_ok=True)
            command = [
                *(sys.executable, "-m", "pytest", file, f"--junitxml={report}"),
                *("-p", "tests.deepspeed_suite.plugin", "-p", "no:cacheprovider", "-n", "1"),
                *(f"--timeout={self.given.test_limit}", "--timeout-method=thread"),
                f"--basetemp={self.folder / 'tmp'}",
            ]
            log, environment = self.path(file, backend, ".txt"), self.environment(file, backend)
            with contextlib.suppress(jobs.JobError):  # of failed tests, or late: see below
                jobs.run(command, self.tests, log, self.given.file_limit, environment)
        if report.exists():
            return outcomes.read(report, file, backend)
        why = f"no end after {self.given.file_limit:.0f} s, or no start"
        return [Outcome(file, backend, "late", self.given.file_limit, why)]

    def groups(self, file: str, backend: str) -> str:
        """The number of default process groups that ranks made, by backend."""
        path = self.path(file, backend, ".groups")
        counts = Counter(path.read_text().split()) if path.exists() else Counter()
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

    def path(self, file: str, backend: str, suffix: str) -> Path:
        """A file of the results of a test file."""
        (self.folder / backend).mkdir(parents=True, exist_ok=True)
        return self.folder / backend / (file.replace("/", ".") + suffix)

    def environment(self, file: str, backend: str) -> dict[str, str]:
        """Of pytest and of the ranks."""
        path = [str(self.given.pytest.resolve())] if self.given.pytest else []
        path += [str(jobs.ROOT), str(self.tests), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            "SMDDP_FABRIC_INTERFACE": "lo",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # A directory of its own: a killed compilation leaves a lock that others would wait for.
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path),
            # The number of "devices"; without it all tests of several ranks are skipped.
            "LOCAL_SIZE": str(_MOST_RANKS),
            "DS_UNITTEST_TIMEOUT": str(int(10 * self.given.test_limit)),  # test_limit is enough
            "SMDDP_SUITE_BACKEND": backend,
            "SMDDP_SUITE_GROUPS": str(self.path(file, backend, ".groups")),
        }


def main() -> int:
    """0 if no test fails over smddp alone, else 1."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no pytest is left
    suite = Suite(arguments)
    files, begin = suite.files(), time.monotonic()
    found: list[Outcome] = []
    for number, file in enumerate(files, 1):
        for backend in arguments.backends:
            start = time.monotonic()
            made = suite.run(file, backend)
            found += made
            print(
                f"[{number}/{len(files)}, {(start - begin) / 60:.0f} min] {file} {backend}: "
                f"{outcomes.counts(made)}; process groups: {suite.groups(file, backend)}; "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    write(found, suite.folder, arguments.source)
    print(f"\n{outcomes.table(found)}\nFailures:\n\n{outcomes.failures(found)}")
    worse = outcomes.worse(found) if REFERENCE in arguments.backends else []
    print(f"Failures that {REFERENCE} does not have: {len(worse)}")
    for outcome, theirs in worse:
        print(f"  {outcome.test}\n    {outcome.backend}: {outcome.outcome}, {outcome.message}")
        print(f"    {REFERENCE}: {theirs}")
    return int(bool(worse))


def write(found: list[Outcome], folder: Path, source: Path) -> None:
    """Writes ``results.json`` with everything, ``results.csv`` with one row per test."""
    number = source / "version.txt"
    facts = {
        "date": datetime.date.today().isoformat(),
        "tests of DeepSpeed": number.read_text().strip() if number.exists() else "unknown",
        **{name: version(name) for name in ("deepspeed", "torch", "transformers")},
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    tests = [outcome._asdict() for outcome in found]
    (folder / "results.json").write_text(json.dumps({"facts": facts, "tests": tests}, indent=1))
    with (folder / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Outcome._fields, *found])


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
