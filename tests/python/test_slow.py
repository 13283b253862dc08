"""The rank and the link that hold the others up while nothing fails: which one is named."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from deepspeed_smddp.diagnostics.report.dump import Group
from deepspeed_smddp.diagnostics.report.slowness import (
    Flows,
    Seen,
    news,
    rows,
    slow_links,
    slow_ranks,
)
from deepspeed_smddp.diagnostics.slow_watch import Watcher
from tests.testbed import Testbed, start_ranks

PROGRAM = Path(__file__).parent / "slow_rank.py"
SECONDS = 2.0  # between two comparisons


def seen(rank: int, late: dict[int, float] | None = None, host: str = "") -> Seen:
    late = late or {}
    return Seen(
        rank=rank,
        host=host or f"host-{rank}",
        seconds=60.0,
        late=late,
        operations=dict.fromkeys(late, 100),
    )


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    ranks = [seen(r, {2: 15.0, 1: 3.0}) for r in (0, 3)] + [seen(1), seen(2)]
    (slow,) = slow_ranks(ranks)
    assert slow.share == pytest.approx(0.25)
    # Rank 1 does not exchange with rank 2, and can't see when it starts.
    assert slow.text.startswith("rank 2 (host-2) is slow: in the last 60 s ranks 0, 3 waited 15 s")


def test_a_rank_that_is_late_as_it_waits_for_another_one_is_not_named() -> None:
    ranks = [seen(0, {1: 30.0}), seen(1, {2: 29.0}), seen(2), seen(3)]
    assert [slow.who for slow in slow_ranks(ranks)] == ["rank 2"]


def test_a_slow_rank_is_named_once_and_again_after_an_interval_without() -> None:
    named: set[str] = set()
    quiet = [seen(0), seen(1)]
    slow = [seen(0, {1: 30.0}), seen(1)]
    said = [len(news(ranks, named)) for ranks in (slow, slow, quiet, slow)]
    assert said == [1, 0, 0, 1]


def network(hosts: str, rates: Callable[[str, str], float], waited: float = 30.0) -> list[Seen]:
    """Ranks with flows of 30 s from every other host, at so many bytes per second."""
    return [
        Seen(
            rank=rank,
            host=host,
            seconds=60.0,
            flows={h: Flows(int(30 * rates(h, host)), 30.0, waited) for h in hosts if h != host},
        )
        for rank, host in enumerate(hosts)
    ]


def test_the_host_whose_link_is_slow_is_named() -> None:
    hosts = "abcd"
    (slow,) = slow_links(network(hosts, halved))
    assert slow.who == "host b"
    # Its own ranks wait for slow flows from all other hosts.
    assert slow.share == pytest.approx(min(1.0, 0.25 * (len(hosts) - 1)))
    assert "the link of host b is slow: a flow from it or to it has 50 MB/s, 100 MB/s" in slow.text
    assert f"rank 1 lost {slow.share:.0%} of the last 60 s by it" in slow.text


def halved(s: str, t: str) -> float:
    return 50e6 if "b" in (s, t) else 100e6


def one_way(s: str, t: str) -> float:
    return 50e6 if s + t == "ab" else 100e6


@pytest.mark.parametrize(
    ("hosts", "rates", "waited", "named"),
    [
        # Noise between other hosts does not hide the host with the slow link.
        ("abcd", lambda s, t: {"ac": 75e6, "da": 78e6}.get(s + t, halved(s, t)), 30.0, ["host b"]),
        ("abc", one_way, 30.0, ["link a b"]),
        ("ab", one_way, 30.0, ["link a b"]),
        ("abcd", halved, 5.0, []),  # no rank waits for it
        ("abcd", lambda s, t: 85e6 if "b" in (s, t) else 100e6, 30.0, []),  # differs little
        ("ab", lambda s, t: 50e6, 30.0, []),  # nothing to compare with
    ],
)
def test_the_costly_link_is_named(
    hosts: str, rates: Callable[[str, str], float], waited: float, named: list[str]
) -> None:
    assert [slow.who for slow in slow_links(network(hosts, rates, waited))] == named


def test_rank_0_that_leaves_at_once_holds_up_no_other_rank() -> None:
    """A new connection to its store would be tried until the store's timeout."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=90)
    )
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=90))
    del server

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended
            Watcher(store, 1, 2, 60)

    starter = threading.Thread(target=watch, daemon=True)
    starter.start()
    starter.join(45)
    assert not starter.is_alive()


def group(late: int, late_seconds: float, flow_bytes: int = 0) -> Group:
    peer = {"rank": 1, "late": late, "late_seconds": late_seconds, "flow_bytes": flow_bytes}
    peer |= {"flow_seconds": flow_bytes / 100, "flow_waited_seconds": flow_bytes / 200}
    return Group.model_validate(
        {"name": "g", "members": [0, 1], "hosts": ["a", "b"], "peers": [peer]}
    )


def test_a_process_that_ends_in_the_first_interval_opens_no_connection() -> None:
    """A thread that still opens one when the interpreter has ended aborts the process."""

    class NoClone(dist.HashStore):  # type: ignore[misc]
        def clone(self) -> None:
            pytest.fail("another connection to the store")

    watcher = Watcher(dist.HashStore(), 0, 2, interval=60)
    watcher._store = NoClone()
    watcher.start()
    time.sleep(0.2)
    assert watcher.is_alive(), "it waits for the end of its interval"
    watcher.stop()
    assert not watcher.is_alive()


def test_an_interval_is_what_was_counted_in_it() -> None:
    interval = Seen(rank=0, host="a", seconds=60.0)
    interval.count(group(5, 2.5, 1000), group(3, 2.0, 400))
    assert interval.late == {1: 0.5} and interval.operations == {1: 2}
    assert interval.flows == {"b": Flows(600, 6.0, 3.0)}
    anew = Seen(rank=0, host="a", seconds=60.0)
    anew.count(group(2, 0.2), group(3, 2.0))  # a new group of the same name
    assert anew.late == {1: 0.2}


def test_the_page_of_a_report_has_the_latest_ranks_and_the_slowest_links() -> None:
    ranks = network("abc", one_way)
    ranks[0].late[2], ranks[0].operations[2] = 1.5, 40
    hosts = {0: "a", 1: "b", 2: "c"}
    shown = rows(ranks, hosts)
    assert shown[0] == "for rank 2 (c) the others waited 0.750 s each, in 40 collectives"
    assert shown[1] == "a flow from host a to host b had 50 MB/s (1,500,000,000 bytes)"
    assert shown[-1] == "the fastest of 6 pairs of hosts had 100 MB/s"
    assert rows(ranks[:2], hosts)[0] == shown[0]  # rank 2 has left no dump


class Job:
    """Ranks on a testbed that gather until :meth:`end`."""

    def __init__(self, bed: Testbed, per_host: int, *arguments: float) -> None:
        pipe = subprocess.PIPE
        self.ranks = start_ranks(
            bed,
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            per_host,
            env={"SMDDP_SLOW_SECONDS": str(SECONDS)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in self.ranks:
            assert rank.stdout.readline() == "ready\n"

    def end(self) -> tuple[list[str], list[dict[str, list[dict[str, float]]]]]:
        """The lines about slow ranks and links, and each rank's counters."""
        self.ranks[0].stdin.close()
        lines, counted = [], []
        for rank in self.ranks:
            counted.append(json.loads(rank.stdout.read()))
            lines += [line for line in rank.stderr.read().splitlines() if " is slow" in line]
            assert rank.wait(timeout=20) == 0
        return lines, counted


@pytest.mark.testbed
def test_the_rank_that_burns_its_processor_is_named(testbed: Callable[..., Testbed]) -> None:
    job = Job(testbed(hosts=2, rate="1gbit"), 2, 16, 0.01, 2, 0.03)
    time.sleep(2.5 * SECONDS)
    lines, counted = job.end()
    assert len(lines) == 1 and lines[0].startswith("smddp: rank 2 ("), lines
    late = [{row["rank"]: row["late_seconds"] for row in rows["ranks"]} for rows in counted]
    for rank in (0, 3):  # those that exchange with it
        assert late[rank][2] > 0.5 * SECONDS
        assert all(late[rank][2] > 4 * late[rank][r] for r in late[rank] if r != 2)
    assert sum(late[2].values()) < late[0][2] / 2


@pytest.mark.testbed
@pytest.mark.alone
def test_the_halved_link_is_named(testbed: Callable[..., Testbed]) -> None:
    bed = testbed(hosts=4, rate="200mbit")
    bed.set_rate(2, 0, "100mbit")
    job = Job(bed, 1, 2048, 0.0, -1, 0.0)
    time.sleep(2.5 * SECONDS)
    lines, counted = job.end()
    name = bed.hosts[2].name
    assert [line for line in lines if f"the link of host {name} is slow" in line] == lines, lines
    assert lines
    for host in (0, 1, 3):
        rates = {row["host"]: row["bytes_per_second"] for row in counted[host]["hosts"]}
        assert min(rates, key=rates.__getitem__) == name
