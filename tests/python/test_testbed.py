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

from tests.testbed import Testbed, ceiling, supervisor
from tests.testbed.ceiling import Bulk
from tests.testbed.links import BURST

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


def output(bed: Testbed, host: int, script: str) -> str:
    result = bed.hosts[host].run(["sh", "-c", script], capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def received(bed: Testbed, host: int, seconds: float) -> float:
    """Bits per second that arrive at the host's first NIC."""
    start, before = time.monotonic(), bed.counters(host)[0]["rx_bytes"]
    time.sleep(seconds)
    after, end = bed.counters(host)[0]["rx_bytes"], time.monotonic()
    return 8 * (after - before) / (end - start)


def test_hosts_are_separate(testbed: MAKE) -> None:
    bed = testbed(hosts=2, nics=2)
    assert [host.name for host in bed.hosts] == ["host0", "host1"]
    assert [output(bed, host, "uname -n") for host in (0, 1)] == ["host0", "host1"]
    assert output(bed, 0, "ls /sys/class/net").split() == ["eth0", "eth1", "lo"]
    output(bed, 0, "echo mine > /dev/shm/smddp-testbed-note")
    assert output(bed, 0, "cat /dev/shm/*") == "mine"
    assert output(bed, 1, "ls -A /dev/shm") == ""
    assert not Path("/dev/shm/smddp-testbed-note").exists()
    assert os.uname().nodename != "host0"


def shaped(bed: Testbed) -> dict[tuple[int, int, str], int]:
    """Bytes of frames that each link has carried, by host, NIC and direction."""
    rows = [
        (host.index, nic, row)
        for host in bed.hosts
        for nic, row in enumerate(bed.drops(host.index))
    ]
    return {(h, nic, way): row[way]["bytes"] for h, nic, row in rows for way in row}


@pytest.mark.alone
@pytest.mark.parametrize(("hosts", "nics"), [(3, 1), (2, 2)])
def test_links_hold_their_rate_both_ways_at_once(testbed: MAKE, hosts: int, nics: int) -> None:
    bed = testbed(hosts=hosts, rate="100mbit", nics=nics)
    for _ in range(5):  # never more than the rate; how much less depends on other load
        start, before = time.monotonic(), shaped(bed)
        reached = ceiling(bed, seconds=1.5, warm_up=0.5)
        after, seconds = shaped(bed), time.monotonic() - start
        for link, count in after.items():
            assert count - before[link] <= 12.5e6 * seconds + BURST, link
        assert reached.rate == [nics * 12.5e6] * hosts
        if 0.85 < reached.utilisation < 1:
            break
    else:
        raise AssertionError(str(reached))


def test_a_cut_cable_carries_nothing_until_it_is_restored(testbed: MAKE) -> None:
    bed = testbed(hosts=2, rate="100mbit")
    assert output(bed, 1, "cat /sys/class/net/eth0/carrier") == "1"
    listening = Bulk(bed.hosts[1], [])
    sending = Bulk(bed.hosts[0], [bed.hosts[1]])
    sending.ask()
    assert eventually(lambda: received(bed, 1, 0.2) > 50e6)
    bed.cut(1, 0)
    assert output(bed, 1, "cat /sys/class/net/eth0/carrier") == "0"
    time.sleep(0.1)
    assert received(bed, 1, 0.5) == 0
    bed.restore(1, 0)
    assert eventually(lambda: received(bed, 1, 0.2) > 50e6)
    assert listening.process.poll() is sending.process.poll() is None


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
