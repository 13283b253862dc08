"""Collectives between emulated hosts: the bytes that cross the links, and the effect of a cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.line_ranks import LineRanks
from tests.testbed import Testbed

MAKE = Callable[..., Testbed]
PROGRAM = Path(__file__).parent / "between_hosts_rank.py"
RATE = "1gbit"


def started(bed: Testbed, per_host: int, cwd: Path, **env: str) -> LineRanks:
    ranks = LineRanks(bed, PROGRAM, per_host, cwd, **{"SMDDP_TIMEOUT_SECONDS": "60", **env})
    assert set(ranks.answers()) == {"ready"}
    return ranks


def crossed(bed: Testbed, host: int) -> tuple[int, int]:
    """Bytes that the host's NICs have sent and received so far."""
    counters = bed.counters(host)
    return sum(nic["tx_bytes"] for nic in counters), sum(nic["rx_bytes"] for nic in counters)


@pytest.mark.testbed
@pytest.mark.parametrize(
    ("hosts", "per_host", "coding"), [(4, 1, "off"), (2, 2, "off"), (4, 1, "on"), (2, 2, "on")]
)
def test_bytes_between_hosts_are_close_to_the_lower_bound(
    testbed: MAKE, tmp_path: Path, hosts: int, per_host: int, coding: str
) -> None:
    bed = testbed(hosts=hosts, rate=RATE)
    ranks = started(bed, per_host, tmp_path, SMDDP_CODING=coding)
    # Whole numbers up to 1000 in fp32.
    least, most = (1, 1.06) if coding == "off" else (0.7, 0.95)
    ranks.all("run", "all_gather", 4096, 1)  # opens the connections
    size, times = 16 << 20, 3
    for op, factor in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        before = [crossed(bed, host) for host in range(hosts)]
        assert ranks.all("run", op, size, times) == ["right"] * (hosts * per_host)
        bound = factor * times * size * (hosts - 1) / hosts
        for host in range(hosts):
            for early, late in zip(before[host], crossed(bed, host), strict=True):
                share = (late - early) / bound
                assert least <= share <= most, (op, host, share)
    ranks.end()


@pytest.mark.testbed
def test_two_nics_share_the_bytes(testbed: MAKE, tmp_path: Path) -> None:
    bed = testbed(hosts=2, rate="500mbit", nics=2)
    ranks = started(bed, 1, tmp_path)
    before = bed.counters(0)
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert ranks.all("run", op, 16 << 20, 2) == ["right"] * 2
    sent = [
        late["tx_bytes"] - early["tx_bytes"]
        for early, late in zip(before, bed.counters(0), strict=True)
    ]
    assert min(sent) > 0.4 * sum(sent), sent
    ranks.end()


@pytest.mark.testbed
@pytest.mark.parametrize("nics", [1, 2])
def test_a_cut_link_gives_an_error_that_names_the_peer_or_the_right_result(
    testbed: MAKE, tmp_path: Path, nics: int
) -> None:
    bed = testbed(hosts=2, rate="100mbit", nics=nics)
    ranks = started(bed, 2, tmp_path, SMDDP_TIMEOUT_SECONDS="5")
    ranks.all("run", "all_gather", 1 << 20, 1)
    ranks.tell("run", "all_gather", 32 << 20, 1)
    time.sleep(0.5)  # the operation takes more than 1.3 s at that rate
    bed.cut(1, nics - 1)
    begun = time.monotonic()
    for rank in range(4):
        answer = ranks.answer(rank)
        if answer == "right":
            assert nics == 2
            continue
        assert "all_gather" in answer
        # The first error may come from a rank of the same host.
        assert "host" in answer, answer
        assert "rank" in answer, answer
    assert time.monotonic() - begun < 30
    ranks.kill()


@pytest.mark.testbed
def test_a_host_that_is_cut_off_is_called_silent_and_joins_again(
    testbed: MAKE, tmp_path: Path
) -> None:
    """All raise after `silence_seconds`, of a deadline of 120 s; later, all make a new group."""
    bed = testbed(hosts=3, rate="1gbit")
    limits = {"SMDDP_TIMEOUT_SECONDS": "120", "SMDDP_SILENCE_SECONDS": "4"}
    ranks = started(bed, 1, tmp_path, **limits)
    for name in ("second", "third"):
        assert ranks.all("run", "all_gather", 3 << 20, 2) == ["right"] * 3
        bed.cut(2, 0)
        begun = time.monotonic()
        ranks.tell("run", "all_gather", 3 << 20, 1)
        answers = [ranks.answer(rank) for rank in range(3)]
        # The silence, and up to 4 s in which the report asks the other ranks (hang_reporter).
        assert time.monotonic() - begun < 10
        assert all("rank 2 (" in answer for answer in answers[:2]), answers
        assert all("has not answered for" in answer for answer in answers), answers
        bed.restore(2, 0)
        assert ranks.all("again", name) == ["joined"] * 3
    assert ranks.all("run", "all_reduce", 3 << 20, 2) == ["right"] * 3
    ranks.end()


@pytest.mark.testbed
def test_a_slow_host_slows_only_those_that_wait_for_it(testbed: MAKE, tmp_path: Path) -> None:
    bed = testbed(hosts=3, rate="1gbit")
    ranks = started(bed, 1, tmp_path)
    ranks.all("pair")  # makes a group of ranks 0 and 1
    ranks.all("run", "all_gather", 4096, 1)
    bed.set_rate(2, 0, "1mbit")
    ranks.tell("start", "all_gather", 3 << 20)  # on all three ranks; about 8 s at that rate
    ranks.tell("run_pair", "all_gather", 1 << 20, 20, ranks=[0, 1])
    for rank in (0, 1):
        answer, world_done = ranks.answer(rank)
        assert answer == "right"
        assert not world_done  # the operation with the slow host still runs
    bed.set_rate(2, 0, "1gbit")
    assert ranks.all("finish") == ["right"] * 3
    ranks.end()
