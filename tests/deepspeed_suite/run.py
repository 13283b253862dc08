"""Runs files of DeepSpeed's tests over each backend in turn.

A test that crashes or takes too long does not stop the others: pytest-timeout ends the process that
runs it, and pytest-xdist starts another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .results import BAD, REFERENCE, Outcome, read

ROOT = Path(__file__).resolve().parents[2]
_MOST_RANKS = 4  # DeepSpeed's tests of more are skipped
_BUILD = """
from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "PinMemoryBuilder"):
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:
        print("DeepSpeed does not build", name, error, flush=True)
"""


@dataclass(frozen=True)
class Suite:
    """The folders of a run, and its time limits."""

    source: Path  # a checkout of DeepSpeed; its folder "tests" is used
    folder: Path  # for a copy of the tests, the logs and the results
    pytest: Path | None  # a folder with the pytest that DeepSpeed's tests need; None: installed
    test_limit: float  # seconds that a test may take
    file_limit: float  # seconds that a file may take, over one backend

    @property
    def tests(self) -> Path:
        """The copy of the tests: in the checkout they would test the checkout's own package."""
        return self.folder / "tests"

    def copy_tests(self) -> None:
        """Copies the source's tests.

        Raises:
            FileNotFoundError: the source is not a checkout of DeepSpeed.
        """
        if not (self.source / "tests/unit/common.py").exists():
            raise FileNotFoundError(
                f"{self.source} is not a checkout of DeepSpeed: it has no tests/unit/common.py"
            )
        shutil.rmtree(self.tests, ignore_errors=True)
        shutil.copytree(self.source / "tests", self.tests)

    def build_operations(self) -> None:
        """Compiles the operations that DeepSpeed would otherwise compile during a test."""
        for lock in self._extensions().rglob("lock"):
            lock.unlink()  # of a killed compilation; the next one would wait for it for ever
        environment = self._environment("none", REFERENCE)
        subprocess.run([sys.executable, "-c", _BUILD], env=environment, check=True)

    def _extensions(self) -> Path:
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR", self.folder / "extensions"))

    def files(self, paths: Sequence[str]) -> list[str]:
        """The test files below the paths, relative to DeepSpeed's folder "tests".

        Raises:
            FileNotFoundError: there is no such path.
        """
        found: list[Path] = []
        for path in paths:
            place = self.tests / path
            if not place.exists():
                raise FileNotFoundError(f"DeepSpeed's tests have no {path}")
            found += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        return list(dict.fromkeys(str(path.relative_to(self.tests)) for path in found))

    def run(self, file: str, backend: str, fresh: bool) -> dict[str, Outcome]:
        """The outcome of each test of ``file``; those of an earlier run are kept, if not fresh."""
        report = self._path(file, backend, ".xml")
        if fresh or not report.exists():
            report.unlink(missing_ok=True)
            self._path(file, backend, ".groups").unlink(missing_ok=True)
            self._pytest(file, backend, report)
        if not report.exists():
            why = f"no end after {self.file_limit:.0f} s, or no start"
            return {file: Outcome(file, backend, "late", self.file_limit, why)}
        return read(report, file, backend)

    def groups(self, file: str, backend: str) -> Counter[str]:
        """The number of default process groups that ranks made, by backend."""
        path = self._path(file, backend, ".groups")
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def _path(self, file: str, backend: str, suffix: str) -> Path:
        folder = self.folder / backend
        folder.mkdir(parents=True, exist_ok=True)
        return folder / (file.replace("/", ".") + suffix)

    def _pytest(self, file: str, backend: str, report: Path) -> None:
        with self._path(file, backend, ".txt").open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", file, f"--junitxml={report}"),
                    *("-p", "tests.deepspeed_suite.plugin", "-p", "no:cacheprovider"),
                    *("-n", "1", f"--timeout={self.test_limit}", "--timeout-method=thread"),
                    f"--basetemp={self.folder / 'tmp'}",
                ],
                cwd=self.tests,
                env=self._environment(file, backend),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.file_limit)
            finally:
                _end_session(process.pid)
                process.wait()

    def _environment(self, file: str, backend: str) -> dict[str, str]:
        path = [str(self.pytest)] if self.pytest else []
        path += [str(ROOT), str(self.tests), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            "SMDDP_FABRIC_INTERFACE": "lo",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # A directory of its own: a killed compilation leaves a lock that others would wait for.
            "TORCH_EXTENSIONS_DIR": str(self._extensions()),
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path),
            # The number of "devices"; without it all tests of several ranks are skipped.
            "LOCAL_SIZE": str(_MOST_RANKS),
            "DS_UNITTEST_TIMEOUT": str(int(10 * self.test_limit)),  # test_limit is enough
            "SMDDP_SUITE_BACKEND": backend,
            "SMDDP_SUITE_GROUPS": str(self._path(file, backend, ".groups")),
        }


def summary(outcomes: dict[str, Outcome]) -> str:
    """The counts of outcomes, for a line of progress."""
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    bad = sum(counts[name] for name in BAD)
    return f"{counts['passed']} passed, {bad} failed, {counts['skipped']} skipped"


def _end_session(leader: int) -> None:
    """Kills all processes of a session: ranks, fork server, compilers, in any process group."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
