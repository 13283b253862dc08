"""The testbed: separate hosts, links that hold their rate, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed import Testbed, supervisor

pytestmark = pytest.mark.testbed

ROOT = Path(__file__).resolve().parents[2]
MAKE = Callable[..., Testbed]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


OWNER = """
import json, os, signal, sys, time
from tests.testbed import Testbed
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of the background
bed = Testbed(hosts=2, nics=2)
for host in bed.hosts:  # two without parent in sessions of their own, one that ignores signals
    host.run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 &"])
    host.popen(["sh", "-c", "trap '' INT TERM HUP; sleep 1000; sleep 1000"])
inodes = [os.stat(f"/proc/{host.pid}/ns/net").st_ino for host in bed.hosts]
inodes.append(os.stat(f"/proc/{bed._supervisor.pid}/ns/net").st_ino)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(1000)  # holds a copy of every pipe of the owner
print(json.dumps(inodes), flush=True)
with bed:
    time.sleep(1000)
"""


def links() -> list[str]:
    text = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return sorted(line.split(":")[1] for line in text.splitlines())


@pytest.mark.parametrize(
    ("how", "ended_by"),
    [("alone", signal.SIGKILL), ("fork", signal.SIGKILL), ("alone", signal.SIGINT)],
)
def test_nothing_outlives_its_owner(testbed: MAKE, how: str, ended_by: signal.Signals) -> None:
    before = links()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        networks = json.loads(owner.stdout.readline())
        # Two holders and the supervisor; on each host three sleeping processes and a shell.
        assert eventually(lambda: len(supervisor.processes_in(networks, ())) == 11)
        owner.send_signal(ended_by)
        assert owner.wait(10) != 0
        assert eventually(lambda: not supervisor.processes_in(networks, ()))
        assert links() == before
    finally:
        owner.kill()
        owner.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)  # the forked copy, which only this test makes


def test_run_starts_every_rank_and_returns_the_failed_status(testbed: MAKE) -> None:
    script = 'echo "$LOCAL_RANK/$LOCAL_WORLD_SIZE $WORLD_SIZE $(uname -n)"; '
    script += "test $RANK != 3 || { sleep 0.5; echo oh >&2; exit 7; }; sleep 100"
    command = [sys.executable, "-m", "tests.testbed", "run", "--hosts", "2"]
    command += ["--ranks-per-host", "2", "--", "sh", "-c", script]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert time.monotonic() - started < 20
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0/2 4 host0",
        "[1] 1/2 4 host0",
        "[2] 0/2 4 host1",
        "[3] 1/2 4 host1",
    ]
    assert "[3] oh" in done.stderr
    assert "rank 3 ended with status 7" in done.stderr
