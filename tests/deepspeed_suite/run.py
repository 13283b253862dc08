"""Runs files of DeepSpeed's tests over each backend in turn; a hung test does not stop others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .results import BAD, REFERENCE, Outcome, read_log

ROOT = Path(__file__).resolve().parents[2]
_TICK = 0.5  # seconds
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
        """The outcome of each test of ``file``; outcomes in the log of an earlier run are kept."""
        log = self._path(file, backend, ".jsonl")
        groups = self._path(file, backend, ".groups")
        if fresh:
            log.unlink(missing_ok=True)
            groups.unlink(missing_ok=True)
        left = self.file_limit
        while left > 0:
            before = len(read_log(log, backend))
            start = time.monotonic()
            ended = self._pytest(file, backend, left)
            left -= time.monotonic() - start
            hit = _running(log)
            if hit is not None and ended is None:
                _add(log, hit, "hung", f"no outcome for {self.test_limit:.0f} s")
            elif hit is not None:
                _add(log, hit, "crashed", f"pytest ended with {ended}")
            elif len(read_log(log, backend)) == before or not _remaining(log):
                break
        for test in _remaining(log):
            _add(log, test, "left out", "the file's time was up")
        return read_log(log, backend)

    def groups(self, file: str, backend: str) -> Counter[str]:
        """The number of default process groups that ranks made, by backend."""
        path = self._path(file, backend, ".groups")
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def uncollected(self, file: str, backend: str) -> list[str]:
        """Errors from the collection of the file's tests."""
        return [
            str(event["message"])
            for event in _events(self._path(file, backend, ".jsonl"))
            if event["event"] == "uncollected"
        ]

    def _path(self, file: str, backend: str, suffix: str) -> Path:
        folder = self.folder / backend
        folder.mkdir(parents=True, exist_ok=True)
        return folder / (file.replace("/", ".") + suffix)

    def _pytest(self, file: str, backend: str, limit: float) -> int | None:
        """pytest's exit status; None if it was killed at a limit."""
        log = self._path(file, backend, ".jsonl")
        with self._path(file, backend, ".txt").open("ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", file),
                    *("-p", "tests.deepspeed_suite.plugin", "-p", "no:cacheprovider"),
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
                return self._watch(process, log, limit)
            finally:
                _end_session(process.pid)
                process.wait()

    def _watch(self, process: subprocess.Popen[bytes], log: Path, limit: float) -> int | None:
        size, quiet, total = -1, 0.0, 0.0
        for passed in _ticks():
            code = process.poll()
            if code is not None:
                return code
            now = log.stat().st_size if log.exists() else 0
            quiet = 0.0 if now != size else quiet + passed
            size = now
            total += passed
            if quiet > self.test_limit or total > limit:
                return None
        raise AssertionError("time ended")

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
            "SMDDP_SUITE_LOG": str(self._path(file, backend, ".jsonl")),
            "SMDDP_SUITE_GROUPS": str(self._path(file, backend, ".groups")),
        }


def summary(outcomes: dict[str, Outcome]) -> str:
    """The counts of outcomes, for a line of progress."""
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    bad = sum(counts[name] for name in BAD)
    others = len(outcomes) - bad - counts["passed"] - counts["left out"]
    late = f", {counts['left out']} left out" if counts["left out"] else ""
    return f"{counts['passed']} passed, {bad} failed, {others} skipped{late}"


def _end_session(leader: int) -> None:
    """Kills all processes of a session: ranks, fork server, compilers, in any process group."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _ticks() -> Iterator[float]:
    """Every half second: the time since the last tick, without time while it was stopped."""
    last = time.monotonic()
    while True:
        time.sleep(_TICK)
        now = time.monotonic()
        yield min(now - last, 4 * _TICK)
        last = now


def _events(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _running(log: Path) -> str | None:
    """The test that has started and has no outcome."""
    test: str | None = None
    for event in _events(log):
        if event["event"] == "start":
            test = str(event["test"])
        elif event["event"] == "outcome" and event["test"] == test:
            test = None
    return test


def _remaining(log: Path) -> list[str]:
    collected: dict[str, None] = {}
    for event in _events(log):
        if event["event"] == "collected":
            collected |= dict.fromkeys(event["tests"])  # type: ignore[call-overload]
        elif event["event"] == "outcome":
            collected.pop(str(event["test"]), None)
    return list(collected)


def _add(log: Path, test: str, outcome: str, message: str) -> None:
    event = {"event": "outcome", "test": test, "outcome": outcome, "seconds": 0.0}
    with log.open("a") as file:
        file.write(json.dumps({**event, "message": message}) + "\n")
