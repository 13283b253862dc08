"""The testbed: separate hosts, links that hold their rate, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.world import BACKEND
from tests.testbed import (
    Testbed,
    TestbedError,
    ceiling,
    parse_rate,
    start_ranks,
    supervisor,
    traffic,
)
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


@contextlib.contextmanager
def bulk(bed: Testbed, source: int, target: int) -> Iterator[None]:
    """TCP traffic from one host to another while the block runs."""
    processes = []
    try:
        for host, peers in ((target, []), (source, bed.hosts[target].addresses)):
            order = {
                "listen": bed.hosts[host].addresses,
                "connect": peers,
                "port": 5201,
                "windows": 1,
                "window": 3600,
            }
            command = [sys.executable, "-I", "-S", traffic.__file__, json.dumps(order)]
            pipe = subprocess.PIPE
            process = bed.hosts[host].popen(command, stdin=pipe, stdout=pipe, text=True)
            processes.append(process)
            assert process.stdout.readline() == "listening\n"
            process.stdin.write(f"{time.monotonic()}\n")
            process.stdin.flush()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


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


def test_environment_names_the_host(testbed: MAKE) -> None:
    bed = testbed(hosts=2, nics=2)
    show = 'echo "$SMDDP_HOST_ID $SMDDP_FABRIC_INTERFACE $GLOO_SOCKET_IFNAME $MASTER_ADDR $NOTE"'

    def environment(env: dict[str, str | None] | None) -> list[str]:
        done = bed.hosts[1].run(["sh", "-c", show], env, capture_output=True, text=True)
        return done.stdout.split()

    expected = ["host1", "eth0,eth1", "eth0", "10.77.0.1"]
    assert environment(None) == expected
    assert environment({**os.environ, "NOTE": "x", "SMDDP_HOST_ID": "y"}) == [*expected, "x"]
    assert environment({"SMDDP_FABRIC_INTERFACE": "eth1"})[1] == "eth1"
    assert environment({"GLOO_SOCKET_IFNAME": None})[2] == "10.77.0.1"


def test_every_address_is_reached_from_every_host(testbed: MAKE) -> None:
    bed = testbed(hosts=3, nics=2, mtu=9000)
    assert bed.hosts[2].addresses == ["10.77.0.3", "10.77.1.3"]
    serve = (
        "import socket as s\nc = s.create_server(('', 7))\nprint(flush=True)\nwhile 1: c.accept()"
    )
    for host in bed.hosts:
        server = host.popen([sys.executable, "-c", serve], stdout=subprocess.PIPE)
        assert server.stdout.read(1)
        server.stdout.close()
    names = [address for host in bed.hosts for address in host.addresses]
    names += ["host0", "host1", "host2-eth1"]
    call = f"import socket\nfor name in {names}: socket.create_connection((name, 7), 5).close()"
    for host in bed.hosts:
        host.run([sys.executable, "-c", call], check=True, timeout=30)


def shaped(bed: Testbed) -> dict[tuple[int, int, str], int]:
    """Bytes of frames that each link has carried, by host, NIC and direction."""
    rows = [
        (host.index, nic, row)
        for host in bed.hosts
        for nic, row in enumerate(bed.drops(host.index))
    ]
    return {(h, nic, way): row[way]["bytes"] for h, nic, row in rows for way in row}


@pytest.mark.alone
@pytest.mark.parametrize(("hosts", "nics"), [(2, 1), (3, 1), (2, 2)])
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


def test_counters_count_what_crosses(testbed: MAKE) -> None:
    bed = testbed(hosts=3, rate="500mbit")
    before = [bed.counters(host)[0] for host in range(3)]
    size = 5_000_000
    sink = (
        "import socket as s\nc, _ = s.create_server(('', 7)).accept()\nwhile c.recv(1 << 20): pass"
    )
    reader = bed.hosts[1].popen([sys.executable, "-c", sink])
    send = f"""
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(("host1", 7))
        break
    except ConnectionError:
        time.sleep(0.05)
connection.sendall(bytes({size}))
"""
    bed.hosts[0].run([sys.executable, "-c", send], check=True, timeout=30)
    assert reader.wait(20) == 0
    after = [bed.counters(host)[0] for host in range(3)]
    moved = [
        {key: late[key] - before[host][key] for key in late} for host, late in enumerate(after)
    ]
    assert size < moved[0]["tx_bytes"] < 1.1 * size
    assert size < moved[1]["rx_bytes"] < 1.1 * size
    assert moved[0]["rx_bytes"] < 0.1 * size
    assert moved[2]["rx_bytes"] < 10_000
    assert moved[1]["rx_packets"] > size / 65536
    sent = bed.drops(0)[0]["egress"]
    assert sent["bytes"] > size
    assert sent["drops"] == 0
    assert sent["overlimits"] > 0
    assert set(bed.drops(1)[0]) == {"egress", "ingress"}


@pytest.mark.alone
def test_rate_changes_while_traffic_flows(testbed: MAKE) -> None:
    bed = testbed(hosts=2, rate="200mbit")
    with bulk(bed, 0, 1):
        assert eventually(lambda: received(bed, 1, 0.3) > 100e6)
        bed.set_rate(1, 0, "20mbit")
        time.sleep(0.3)
        assert received(bed, 1, 1.0) < 22e6
        bed.set_rate(1, 0, 200e6)
        assert eventually(lambda: received(bed, 1, 0.3) > 100e6)
    assert bed.rates == [[200_000_000], [200_000_000]]


def test_a_cut_cable_carries_nothing_until_it_is_restored(testbed: MAKE) -> None:
    bed = testbed(hosts=2, rate="100mbit")
    assert output(bed, 1, "cat /sys/class/net/eth0/carrier") == "1"
    with bulk(bed, 0, 1):
        assert eventually(lambda: received(bed, 1, 0.2) > 50e6)
        bed.cut(1, 0)
        assert output(bed, 1, "cat /sys/class/net/eth0/carrier") == "0"
        time.sleep(0.1)
        assert received(bed, 1, 0.5) == 0
        bed.restore(1, 0)
        assert eventually(lambda: received(bed, 1, 0.2) > 50e6)


def test_testbeds_do_not_reach_each_other(testbed: MAKE) -> None:
    first, second = testbed(hosts=2, rate="100mbit"), testbed(hosts=2, rate="100mbit")
    assert output(first, 0, "echo 1 > /dev/shm/note; uname -n") == output(second, 0, "uname -n")
    assert output(second, 0, "ls -A /dev/shm") == ""
    quiet = second.counters(1)[0]["rx_bytes"]
    with bulk(first, 0, 1):
        assert eventually(lambda: received(first, 1, 0.2) > 50e6)
    assert second.counters(1)[0]["rx_bytes"] - quiet < 10_000
    first.close()
    assert output(second, 1, "uname -n") == "host1"


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


def test_closing_ends_every_process(testbed: MAKE) -> None:
    bed = testbed(hosts=2)
    process = bed.hosts[1].popen(["sleep", "1000"])
    holders = [host.pid for host in bed.hosts]
    bed.close()
    assert process.wait(5) == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)
    bed.close()
    with pytest.raises(TestbedError, match="closed"):
        bed.cut(0, 0)
    with pytest.raises(TestbedError, match="closed"):
        bed.hosts[0].run(["true"])


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts is 0"):
        Testbed(hosts=0)
    with pytest.raises(ValueError, match="1gbits"):
        Testbed(rate="1gbits")
    assert [parse_rate(r) for r in ("1Gbit", "2.5gbit", 1e6)] == [10**9, 25 * 10**8, 10**6]


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


GATHER = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group(sys.argv[1])
rank, size, count = dist.get_rank(), dist.get_world_size(), int(sys.argv[2]) // 4
whole = torch.empty(size * count)
dist.all_gather_into_tensor(whole, torch.arange(count) * 0.5 + rank)
expected = torch.cat([torch.arange(count) * 0.5 + r for r in range(size)])
assert torch.equal(whole, expected)
dist.destroy_process_group()
"""


def test_shards_cross_between_hosts(testbed: MAKE, tmp_path: Path) -> None:
    bed = testbed(hosts=2)
    shard = 4 << 20  # bytes
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", GATHER, BACKEND, str(shard)]
    before = [bed.counters(host)[0] for host in (0, 1)]
    ranks = start_ranks(bed, command, 2, cwd=tmp_path, stderr=pipe, text=True)
    for rank in ranks:
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0, errors
    after = [bed.counters(host)[0] for host in (0, 1)]
    for early, late in zip(before, after, strict=True):
        # Both shards of each host go to the other, besides addresses and TCP's own traffic.
        assert 2 * shard <= late["tx_bytes"] - early["tx_bytes"] < 4 * shard
        assert 2 * shard <= late["rx_bytes"] - early["rx_bytes"] < 4 * shard
