"""What ``smddp doctor`` concludes from rates, times and clocks; the order of the pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_smddp.diagnostics.doctor import coding_check, links, measurements
from deepspeed_smddp.diagnostics.doctor.facts import Fact, RankFacts, Verdict
from deepspeed_smddp.diagnostics.doctor.job_doctor import JobReport
from deepspeed_smddp.diagnostics.doctor.links import BLOCKED, MEASURED, SKIPPED, Half

# ---- the order of the pairs


@given(st.integers(0, 40))
def test_every_pair_comes_once_and_no_host_twice_in_a_round(hosts: int) -> None:
    found = links.rounds(hosts, 1000)
    for pairs in found:
        flat = [host for pair in pairs for host in pair]
        assert len(flat) == len(set(flat)) >= hosts - 1
        for first, second in pairs:
            assert links.partner(pairs, first) == second
            assert links.partner(pairs, second) == first
    every = [pair for pairs in found for pair in pairs]
    assert sorted(every) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]


@given(st.integers(33, 300))
def test_many_hosts_are_measured_in_a_bounded_number_of_rounds(hosts: int) -> None:
    found = links.rounds(hosts)
    every = [pair for pairs in found for pair in pairs]
    assert len(found) == links.MOST_ROUNDS and len(every) == len(set(every))
    assert {host for pair in every for host in pair} == set(range(hosts))


# ---- the judgement alone


def job(hosts: str) -> list[RankFacts]:
    """Two ranks for each letter."""
    fabric, version = Fact("libfabric", "tcp"), Fact("deepspeed-smddp", "1")
    return [
        RankFacts(2 * i + k, host, host, k, [fabric, version])
        for i, host in enumerate(hosts)
        for k in range(2)
    ]


def halves(rates: Mapping[tuple[int, int], float | str]) -> dict[int, list[Half]]:
    """What both ranks of each pair say; a text is an error."""
    said: dict[int, list[Half]] = {}
    for (first, second), value in rates.items():
        for rank, other in ((first, second), (second, first)):
            if isinstance(value, str):
                said.setdefault(rank, []).append(Half(0, other, BLOCKED, why=value))
            else:
                said.setdefault(rank, []).append(Half(0, other, MEASURED, value))
    return said


def judged(hosts: str, rates: Mapping[tuple[int, int], float | str]) -> dict[str, list[Any]]:
    ranks = job(hosts)
    found: dict[str, list[Any]] = {}
    for deviation in links.judge(links.links(halves(rates), ranks), ranks):
        found.setdefault(deviation.name, []).append(deviation.ranks)
    return found


def pairs(hosts: int) -> Iterable[tuple[int, int]]:
    return ((2 * a, 2 * b) for a in range(hosts) for b in range(a + 1, hosts))


EVEN: dict[tuple[int, int], float | str] = dict.fromkeys(pairs(4), 100.0)


@pytest.mark.parametrize(
    ("hosts", "rates", "found"),
    [
        ("abcd", {pair: 100.0 + sum(pair) for pair in pairs(4)}, {}),
        ("ab", {(0, 2): 5.0}, {}),
        ("a", {}, {}),
        # The links of a slow host are not named.
        ("abc", {p: 50.0 if 4 in p else 100.0 for p in pairs(3)}, {"slow host": [(4, 5)]}),
        ("abcd", {**EVEN, (2, 6): 50.0}, {"slow link": [(2, 6)]}),
        ("abcd", {**EVEN, (0, 6): "refused"}, {"blocked link": [(0, 6)]}),
        ("abcd", {p: "late" if 4 in p else 9.0 for p in pairs(4)}, {"blocked host": [(4, 5)]}),
        ("ab", {(0, 2): "refused"}, {"blocked link": [(0, 2)]}),
    ],
)
def test_slow_and_blocked_links_and_hosts_are_named(
    hosts: str, rates: Mapping[tuple[int, int], float | str], found: dict[str, list[Any]]
) -> None:
    assert judged(hosts, rates) == found


def test_one_rank_that_measured_and_one_that_failed_are_a_blocked_link() -> None:
    said = {0: [Half(0, 2, MEASURED, 9.0)], 2: [Half(0, 0, BLOCKED, why="timed out")]}
    (link,) = links.links(said, job("ab"))
    assert (link.state, link.why) == (BLOCKED, "timed out")
    del said[2]
    (link,) = links.links(said, job("ab"))
    assert link.state == SKIPPED


def test_the_fastest_of_several_times_counts() -> None:
    times = ((50.0, 60.0), (90.0, 95.0), (120.0, 20.0))
    said = {
        rank: [Half(n, 2 - rank, MEASURED, pair[rank // 2]) for n, pair in enumerate(times)]
        for rank in (0, 2)
    }
    said[0].append(Half(3, 2, SKIPPED, why="the test ends"))
    (link,) = links.links(said, job("ab"))
    assert (link.state, link.bytes_per_second) == (MEASURED, 90.0)


def test_a_host_whose_pairs_fail_is_left_out_of_further_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def broken(store: Any, place: int, ranks: list[int], seconds: float) -> float:
        calls.append(ranks)
        raise RuntimeError("no route to host")

    class Alone:
        """The store of a rank whose partners are all ready."""

        rank = 0

        def put(self, key: str, value: Any) -> None: ...
        def get(self, key: str, kind: type, seconds: float) -> str:
            return ""

        def part(self, key: str) -> None: ...

    monkeypatch.setattr(links, "measure_pair", broken)
    found = links.run(Alone(), [0, 1, 2, 3, 4, 5])  # type: ignore[arg-type]
    assert [half.state for half in found[:5]] == [BLOCKED] * 2 + [SKIPPED] * 3
    assert len(calls) == links.MOST_FAILED and "2 other pairs" in found[4].why


def test_a_slow_rank_and_its_cause() -> None:
    ranks = job("ab")
    cores = {rank: measurements.Core(0.02, 0.0) for rank in range(3)}
    assert list(measurements.judge_cores({**cores, 3: measurements.Core(0.029, 0.2)}, ranks)) == []
    (busy,) = measurements.judge_cores({**cores, 3: measurements.Core(0.05, 0.6)}, ranks)
    assert busy.ranks == (3,) and "rank 3 (host b)" in busy.text
    assert "60% of the time: other processes" in busy.text
    (cold,) = measurements.judge_cores({**cores, 3: measurements.Core(0.05, 0.0)}, ranks)
    assert "its clock, power or heat" in cold.text


def test_the_page_shows_the_network_that_operations_assume() -> None:
    models = ["20,4,0.12", "30,4,0.12", "25,6,0.11"]
    halves = [Half(0, 2, MEASURED, network=m, network_source="measured now") for m in models]
    part = measurements.Part(measurements.Core(0.02, 0.0), halves)
    stored = "26,4,0.11, measured on 2026-11-20 08:00 UTC"
    measured = measurements.joined({0: part}, job("ab"), stored)
    assert measured.network == "25,4,0.12"
    sentences = list(measured.sentences())
    assert any("hosts is 25,4,0.12, measured now" in sentence for sentence in sentences), sentences
    assert f"a job of these ranks takes the network {stored}" in sentences


def test_what_would_be_coded_follows_the_measured_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_check, "_measure", lambda dtype: (10e9, 20e9))

    def said(network: str, setting: str = "auto") -> str:
        ranks = job("ab")
        ranks[0].facts.append(Fact("coding", setting))
        halves = [Half(0, 2, MEASURED, network=network)]
        part = measurements.Part(measurements.Core(0.02, 0.0), halves)
        sentences = measurements.joined({0: part}, ranks).sentences()
        return next(s for s in sentences if "coding" in s)

    # Two ranks of a host share its rate, in GB/s.
    slow = said("20,4,0.12")
    assert "rank has 480 Mbit/s; bf16 weights coded: 0.71 of the bytes, pays up to 12.9 G" in slow
    assert "; fp32 weights coded: 0.86 of the bytes, pays up to 4.93 Gbit/s" in slow
    fast = said("20,4,2.5")
    assert "bf16 weights coded" in fast and "fp32 weights not coded" in fast
    assert said("20,4,0.12", "off") == 'coding between hosts: "off", as set'


def test_ranks_that_can_not_measure_are_passed_over_and_said() -> None:
    ranks = job("abc")
    for rank in (2, 4, 5):
        ranks[rank].facts = [f for f in ranks[rank].facts if f.name != "libfabric"]
    assert measurements.plan(ranks, "").ranks == [0, 3]
    part = measurements.Part(measurements.Core(0.02, 0.0), [])
    measured = measurements.joined(dict.fromkeys(range(5), part), ranks)
    assert measured.hosts_not_measured == ["c"] and measured.missing == [5]
    (unfinished,) = measured.deviations(ranks)
    assert unfinished.verdict is Verdict.FAILED and unfinished.ranks == (5,)
    ranks[3].facts = [Fact("libfabric", "tcp"), Fact("deepspeed-smddp", "another")]
    assert measurements.plan(ranks, "").ranks == [0]
    report = JobReport(6, ranks, [unfinished], measured)
    assert json.loads(report.as_json())["measured"]["hosts_not_measured"] == ["c"]
