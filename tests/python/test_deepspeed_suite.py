"""The runner of DeepSpeed's own tests: hanging and crashing tests, and the comparison."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed_suite import results, run
from tests.deepspeed_suite.results import Outcome

FILE = "unit/test_few.py"
TESTS = [f"{FILE}::test_{name}" for name in "abcd"]


def outcome(test: str, what: str = "passed") -> dict[str, Any]:
    return {"event": "outcome", "test": test, "outcome": what, "seconds": 1.0, "message": ""}


def start(test: str) -> dict[str, Any]:
    return {"event": "start", "test": test}


class Played(run.Suite):
    """In place of pytest: writes one list of events and returns an exit status, per start."""

    sessions: Iterator[tuple[list[dict[str, Any]], int | None]]

    def _pytest(self, file: str, backend: str, limit: float) -> int | None:
        events, status = next(self.sessions)
        with self._path(file, backend, ".jsonl").open("a") as log:
            log.writelines(json.dumps(event) + "\n" for event in events)
        return status


def played(tmp_path: Path, *sessions: tuple[list[dict[str, Any]], int | None]) -> Played:
    suite = Played(tmp_path, tmp_path, None, test_limit=1, file_limit=60)
    object.__setattr__(suite, "sessions", iter(sessions))
    return suite


def test_a_hung_and_a_crashed_test_end_alone(tmp_path: Path) -> None:
    a, b, c, d = TESTS
    suite = played(
        tmp_path,
        ([{"event": "collected", "tests": TESTS}, start(a), outcome(a), start(b)], None),
        ([{"event": "collected", "tests": [c, d]}, start(c)], -11),
        ([{"event": "collected", "tests": [d]}, start(d), outcome(d, "failed")], 1),
    )
    found = suite.run(FILE, "smddp", fresh=True)
    assert [found[test].outcome for test in TESTS] == ["passed", "hung", "crashed", "failed"]


def test_tests_that_pytest_never_reached_are_left_out(tmp_path: Path) -> None:
    a = TESTS[0]
    suite = played(
        tmp_path,
        ([{"event": "collected", "tests": TESTS}, start(a), outcome(a)], 2),
        ([], 2),
    )
    found = suite.run(FILE, "smddp", fresh=True)
    assert [found[test].outcome for test in TESTS] == ["passed"] + 3 * ["left out"]


def test_only_failures_that_the_reference_does_not_have_count() -> None:
    def over(backend: str, *whats: str) -> dict[str, Outcome]:
        pairs = zip(TESTS, whats, strict=True)
        return {test: Outcome(test, backend, what, 1.0, "why | so") for test, what in pairs}

    both = {
        "gloo": over("gloo", "passed", "failed", "hung", "skipped"),
        "smddp": over("smddp", "hung", "error", "passed", "passed"),
    }
    assert [mine.test for mine, _ in results.worse(both, "smddp")] == [TESTS[0]]
    assert f"| {FILE} | 1 passed, 1 failed, 1 hung, 1 skipped |" in results.table(both)
    assert results.failures(both).count("why \\| so") == 4


def test_processes_that_a_session_started_end_with_it() -> None:
    # For example a compiler, which ninja puts into a process group of its own.
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'],"
        " process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    if sys.version_info < (3, 11):
        pytest.skip("Popen has no process_group")
    leader = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    with leader.stdout:
        child = int(leader.stdout.readline())
    run._end_session(leader.pid)
    assert leader.wait(20) == -signal.SIGKILL
    end = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < end, "still there"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
