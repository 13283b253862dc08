"""The network model that the first group between hosts measures, on links of a known rate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.line_ranks import LineRanks
from tests.testbed import Testbed

MAKE = Callable[..., Testbed]
MADE = Callable[..., list[dict[str, Any]]]
PROGRAM = Path(__file__).parent / "measured_network_rank.py"


@contextlib.contextmanager
def started(bed: Testbed, per_host: int, cwd: Path) -> Iterator[MADE]:
    """One process per rank, from which each job's rank is forked. All jobs have one cache, ``cwd``.

    ``made(curve, gathers)`` starts a job with that curve in SMDDP_DEBUG, which makes so many large
    AllGathers before its second group, and returns what each rank tells.
    """
    ranks = LineRanks(bed, PROGRAM, per_host, cwd, SMDDP_DEBUG=None, XDG_CACHE_HOME=str(cwd))
    yield lambda curve="", gathers=0: ranks.all(curve, gathers)
    ranks.end()


@pytest.mark.alone
@pytest.mark.testbed
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 1)])
@pytest.mark.parametrize(("rate", "expected"), [("100mbit", 0.0125), ("1gbit", 0.125)])
def test_the_rate_is_that_of_the_links(
    testbed: MAKE, tmp_path: Path, hosts: int, per_host: int, rate: str, expected: float
) -> None:
    with started(testbed(hosts=hosts, rate=rate), per_host, tmp_path) as made:
        found = made()
    assert len({network for rank in found for network in rank["networks"]}) == 1, found
    latency, overhead, gigabytes = map(float, found[0]["networks"][0].split(","))
    assert gigabytes == pytest.approx(expected, rel=0.25), found
    assert 1 <= latency <= 10_000
    assert 0.1 <= overhead <= 50
    print(found)


@pytest.mark.testbed
def test_the_next_job_takes_over_what_was_measured_on_the_same_nics(
    testbed: MAKE, tmp_path: Path
) -> None:
    bed = testbed(hosts=2, rate="100mbit")
    with started(bed, 2, tmp_path) as made:
        first = made()
        before = bed.counters(0)[0]["tx_bytes"]
        second = made()
        assert bed.counters(0)[0]["tx_bytes"] - before < 64 << 10
        anew = made("measure")
    assert [rank["networks"] for rank in second] == [rank["networks"] for rank in first]
    assert {source for rank in first for source in rank["sources"]} == {"measured now"}
    (source,) = {source for rank in second for source in rank["sources"]}
    assert source.startswith("measured on 20"), second
    assert {source for rank in anew for source in rank["sources"]} == {"measured now"}
    # Other NICs of the same names and addresses.
    bed.close()
    with started(testbed(hosts=2, rate="100mbit"), 2, tmp_path) as made:
        others = made()
    assert {source for rank in others for source in rank["sources"]} == {"measured now"}


@pytest.mark.alone
@pytest.mark.testbed
@pytest.mark.parametrize("rates", [("100mbit", "1gbit"), ("1gbit", "100mbit")])
def test_a_model_that_transfers_contradict_is_measured_again(
    testbed: MAKE, tmp_path: Path, rates: tuple[str, str]
) -> None:
    """As after a measurement on a busy machine, or where a link has changed since."""
    bed = testbed(hosts=2, rate=rates[0])
    with started(bed, 2, tmp_path) as made:
        first = made()
        for host in range(2):
            bed.set_rate(host, 0, rates[1])
        second = made("", 20)
        third = made("", 20)
    expected = [0.0125 if rate == "100mbit" else 0.125 for rate in rates]
    for rank in second:
        was, now = (float(network.split(",")[2]) for network in rank["networks"])
        assert was == pytest.approx(expected[0], rel=0.25), (first, second)
        assert now == pytest.approx(expected[1], rel=0.25), second
    assert len({rank["networks"][1] for rank in second}) == 1, second
    # What is right now is kept.
    assert {n for rank in third for n in rank["networks"]} == {second[0]["networks"][1]}, third
