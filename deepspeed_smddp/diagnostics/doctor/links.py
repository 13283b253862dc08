"""The links between the hosts of a job: measured pair by pair, and judged.

Pairs of hosts are measured in a round-robin tournament: in each round a host is in one pair at
most, so that pairs measured at the same time share no link of a host. The rate of a pair is that of
an AllGather of a small group of its own, repeated. What is slow or blocked is a pure function of
what the pairs measured.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.schema import DEBUG
from deepspeed_smddp.config.units import rate_text
from deepspeed_smddp.diagnostics.doctor import facts
from deepspeed_smddp.diagnostics.doctor.facts import Deviation, RankFacts, Verdict
from deepspeed_smddp.diagnostics.doctor.rendezvous import Rendezvous
from deepspeed_smddp.distributed import extension

# Rounds, at most: more hosts than that are measured with some of the others.
MOST_ROUNDS = 31
# Few hosts are measured several times, at other moments: what disturbs one time passes.
_REPEATED_ROUNDS = 16
_MOST_TIMES = 3
# An AllGather grows until it takes long enough for the clock and for the queues on the way.
FIRST_BYTES = 64 << 10
MOST_BYTES = 8 << 20
_LONG_ENOUGH = 0.03  # seconds
_ALL_SECONDS = 0.15
# The curve in SMDDP_DEBUG with which a job measures whatever an earlier one has measured.
ANEW = "measure"
# The timeout of one pair; the time after which no further pair begins.
PAIR_SECONDS = 5.0
ALL_SECONDS = 30.0
# After as many failed pairs and no other, a host is not tried with the rest.
MOST_FAILED = 2
MEASURED, BLOCKED, SKIPPED = "measured", "blocked", "skipped"
# A host or a link below this share of what it is compared with is slow.
SLOW = 0.75


def rounds(hosts: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """The pairs of each round, the smaller number first; at most ``most`` rounds, evenly chosen.

    The circle method: number the hosts 0..n-1 with n even (an odd number gets a host that does not
    exist); in round r, host n-1 meets r, and r+i meets r-i modulo n-1.
    """
    if hosts < 2:
        return []
    n = hosts + hosts % 2
    chosen = range(n - 1) if n - 1 <= most else [i * (n - 1) // most for i in range(most)]
    found = []
    for r in chosen:
        pairs = [(r, n - 1)]
        pairs += [((r + i) % (n - 1), (r - i) % (n - 1)) for i in range(1, n // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < hosts])
    return found


def schedule(hosts: int) -> list[list[tuple[int, int]]]:
    """All rounds, up to three times over, as long as that makes 16 rounds at most."""
    once = rounds(hosts)
    return once * max(1, min(_MOST_TIMES, _REPEATED_ROUNDS // max(1, len(once))))


def partner(pairs: list[tuple[int, int]], host: int) -> int | None:
    """The other host of this host's pair in a round; None if it has none."""
    return next((sum(pair) - host for pair in pairs if host in pair), None)


def measure_pair(
    store: Any, place: int, ranks: list[int], seconds: float
) -> tuple[float, str, str]:
    """Bytes per second each way, at the same time, between this rank and one other.

    Also the network model that their group uses, and where it is from. If ``SMDDP_DEBUG`` has no
    curve, they measure it, whatever an earlier job has measured.

    Both ranks call it, with a store of their own; ``place`` is 0 on one of them, 1 on the other.
    The best call of the largest size counts: what else runs on the machines makes a call slower,
    never faster than the link. ``seconds``: the timeout of the rendezvous and of each AllGather.

    Raises:
        RuntimeError: no data passes, or not in time; says why.
    """
    if settings.current().debug.curve == "auto":
        os.environ[DEBUG] = f"{os.environ.get(DEBUG, '')},curve={ANEW}"
    timeout = timedelta(seconds=seconds)
    name = "doctor {}-{}".format(*ranks)
    group = extension.core.ProcessGroupSMDDP(
        store, place, 2, timeout, name, _no_fallback, lambda *_: None, ranks
    )
    try:
        rate = _rate(group, place)
        states = [state for state in extension.core.group_states() if state["name"] == name]
    except BaseException:
        group.abort()
        raise
    group.shutdown()
    return rate, states[0]["network"], states[0]["network_source"]


def _rate(group: Any, place: int) -> float:
    """Both ranks send how long their last call took: by the longer time they decide the same."""
    size, spent, best = FIRST_BYTES, 0.0, math.inf
    whole = torch.zeros(2 * MOST_BYTES, dtype=torch.uint8)
    part = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    took = math.inf  # the first call connects the ranks, those of a new size have none before them
    while True:
        part[:8].view(torch.float64).fill_(took)
        began = time.perf_counter()
        group._allgather_base(whole[: 2 * size], part[:size]).wait()
        took = time.perf_counter() - began
        best = min(best, took)
        before = max(float(whole[at : at + 8].view(torch.float64)) for at in (0, size))
        if math.isinf(before):
            continue
        spent += before
        if before < _LONG_ENOUGH and size < MOST_BYTES:
            size, best, took = 2 * size, math.inf, math.inf
        elif spent >= _ALL_SECONDS:
            return size / best


def _no_fallback(device: str, process: str, address: str) -> Any:
    raise RuntimeError(f"smddp doctor measures smddp alone ({device}, {process}, {address})")


@dataclass(frozen=True)
class Half:
    """What one rank says of a pair: its rate in bytes per second each way, or why it has none."""

    round: int
    partner: int  # a rank
    state: str
    rate: float = 0.0
    why: str = ""
    network: str = ""  # the network model that the pair's group used
    network_source: str = ""


def run(rendezvous: Rendezvous, ranks: Sequence[int]) -> list[Half]:
    """Measures this rank with each of ``ranks``, one of each host; the store keeps them in step.

    A rank that is not among them measures nothing.
    """
    if rendezvous.rank not in ranks:
        return []
    found: list[Half] = []
    end = time.monotonic() + ALL_SECONDS
    own = ranks.index(rendezvous.rank)
    for number, pairs in enumerate(schedule(len(ranks))):
        other = partner(pairs, own)
        if other is not None:
            refusal = _refusal(found, ranks[other], end)
            found.append(_pair(rendezvous, number, ranks[other], refusal, end))
    return found


def _refusal(found: Sequence[Half], partner: int, end: float) -> str:
    """Why this rank does not measure with a partner; "" if it does."""
    states = [half.state for half in found]
    if any(half.partner == partner and half.state == BLOCKED for half in found):
        return "no data passed before"
    if states.count(BLOCKED) >= MOST_FAILED and MEASURED not in states:
        return f"no data passed in {MOST_FAILED} other pairs of it"
    return "" if time.monotonic() < end else f"the test ends after {ALL_SECONDS:.0f} s"


def _pair(rendezvous: Rendezvous, number: int, partner: int, refusal: str, end: float) -> Half:
    ranks = sorted((rendezvous.rank, partner))
    # A partner may still be in a pair that fails. Only when both have come does the time begin.
    rendezvous.put(f"pair/{number}/{rendezvous.rank}", refusal)
    if not refusal:
        wait = max(end - time.monotonic(), PAIR_SECONDS)
        answer = rendezvous.get(f"pair/{number}/{partner}", str, wait)
        refusal = f"rank {partner} did not come to this pair" if answer is None else answer
        if answer is None:
            rendezvous.put(f"pair/{number}/{rendezvous.rank}", refusal)  # should it come yet
    if refusal:
        return Half(number, partner, SKIPPED, why=refusal)
    try:
        store = rendezvous.part("pair-store/{}/{}-{}".format(number, *ranks))
        rate, network, source = measure_pair(
            store, ranks.index(rendezvous.rank), ranks, PAIR_SECONDS
        )
    except Exception as error:  # the other pairs are still to be measured
        return Half(number, partner, BLOCKED, why=str(error).strip() or type(error).__name__)
    return Half(number, partner, MEASURED, rate, network=network, network_source=source)


@dataclass(frozen=True)
class Link:
    """A pair of hosts; ``bytes_per_second`` each way, at the same time; ``why`` if not measured."""

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    state: str
    bytes_per_second: float = 0.0
    why: str = ""


def links(halves: Mapping[int, Sequence[Half]], ranks: Sequence[RankFacts]) -> list[Link]:
    """The pairs of what both of their ranks say.

    A pair that failed once is blocked. Of several times that both ranks measured, the fastest
    counts; each time the slower of the two ranks.
    """
    host = {rank.rank: rank.host for rank in ranks}
    said: dict[tuple[int, int], list[Half]] = {}
    for rank, own in sorted(halves.items()):
        for half in own:
            key = (min(rank, half.partner), max(rank, half.partner))
            said.setdefault(key, []).append(half)
    found = []
    for pair, both in said.items():
        hosts = (host.get(pair[0], str(pair[0])), host.get(pair[1], str(pair[1])))
        times: dict[int, list[float]] = {}
        for half in both:
            if half.state == MEASURED:
                times.setdefault(half.round, []).append(half.rate)
        rates = [min(rates) for rates in times.values() if len(rates) == 2]
        why = {half.state: half.why for half in reversed(both)}
        if BLOCKED in why:
            found.append(Link(hosts, pair, BLOCKED, why=why[BLOCKED]))
        elif rates:
            found.append(Link(hosts, pair, MEASURED, max(rates)))
        else:
            skipped = why.get(SKIPPED) or "one of its ranks did not finish"
            found.append(Link(hosts, pair, SKIPPED, why=skipped))
    return found


def best_rates(found: Sequence[Link]) -> dict[int, float]:
    """The rate of the fastest pair of each host, by the rank that measured; bytes per second."""
    best: dict[int, float] = {}
    for link in found:
        if link.state == MEASURED:
            for rank in link.ranks:
                best[rank] = max(best.get(rank, 0.0), link.bytes_per_second)
    return best


def judge(found: Sequence[Link], ranks: Sequence[RankFacts]) -> list[Deviation]:
    """Hosts and links without data, slow hosts, then links that are slower than their hosts."""
    return [*_blocked(found, ranks), *_slow_hosts(found, ranks), *_slow_links(found)]


def _blocked(found: Sequence[Link], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    tried: dict[int, list[Link]] = {}
    for link in found:
        if link.state != SKIPPED:
            for rank in link.ranks:
                tried.setdefault(rank, []).append(link)
    dead = {
        rank
        for rank, own in tried.items()
        if len(own) > 1 and all(link.state == BLOCKED for link in own)
    }
    for rank in sorted(dead):
        members = facts.of_its_host(rank, ranks)
        others = ", ".join(link.hosts[link.ranks[0] == rank] for link in tried[rank])
        text = f"no data passes between it and {others}: {tried[rank][0].why}"
        yield facts.of_ranks("blocked host", members, ranks, text, Verdict.FAILED)
    for link in found:
        if link.state == BLOCKED and not dead & set(link.ranks):
            text = f"{_named(link)}: no data passes: {link.why}"
            yield Deviation("blocked link", text, Verdict.FAILED, link.ranks)


def _slow_hosts(found: Sequence[Link], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    best = best_rates(found)
    if not best:
        return
    median = statistics.median(best.values())
    for rank, rate in sorted(best.items()):
        if rate < SLOW * median:
            members = facts.of_its_host(rank, ranks)
            text = f"{rate_text(rate)} each way with the best of the other hosts; "
            text += f"the median of all hosts is {rate_text(median)}"
            yield facts.of_ranks("slow host", members, ranks, text)


def _slow_links(found: Sequence[Link]) -> Iterator[Deviation]:
    best = best_rates(found)
    for link in found:
        if link.state != MEASURED:
            continue
        first, second = (best[rank] for rank in link.ranks)
        if link.bytes_per_second < SLOW * min(first, second):
            own, rates = rate_text(link.bytes_per_second), (rate_text(first), rate_text(second))
            text = (
                f"{_named(link)}: {own} each way; with other hosts they reach {' and '.join(rates)}"
            )
            yield Deviation("slow link", text, Verdict.LIMITED, link.ranks)


def _named(link: Link) -> str:
    return f"hosts {link.hosts[0]} and {link.hosts[1]} (ranks {link.ranks[0]} and {link.ranks[1]})"
