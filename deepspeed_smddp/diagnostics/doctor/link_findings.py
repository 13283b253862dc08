"""The slow and blocked links and hosts: a pure function of what the pairs measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_smddp.diagnostics.doctor import deviations
from deepspeed_smddp.diagnostics.doctor.deviations import Deviation
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.link_check import BLOCKED, MEASURED, SKIPPED, Half
from deepspeed_smddp.diagnostics.doctor.rank_facts import RankFacts, of_its_host

# A host or a link below this share of what it is compared with is slow.
SLOW = 0.75


@dataclass(frozen=True)
class Link:
    """A pair of hosts; ``rate`` is in bytes per second each way, at the same time."""

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    state: str
    rate: float = 0.0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        shown: dict[str, Any] = {"hosts": list(self.hosts), "ranks": list(self.ranks)}
        shown["state"] = self.state
        if self.state == MEASURED:
            return {**shown, "bytes_per_second": round(self.rate)}
        return {**shown, "why": self.why}


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
                best[rank] = max(best.get(rank, 0.0), link.rate)
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
        members = of_its_host(rank, ranks)
        others = ", ".join(_other(link, rank) for link in tried[rank])
        text = (
            f"{deviations.named(members, ranks)}: no data passes between it and {others}: "
            f"{tried[rank][0].why}"
        )
        yield Deviation("blocked host", text, Verdict.FAILED, tuple(members))
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
            members = of_its_host(rank, ranks)
            text = (
                f"{deviations.named(members, ranks)}: {shown(rate)} each way with the best of the "
                f"other hosts; the median of all hosts is {shown(median)}"
            )
            yield Deviation("slow host", text, Verdict.LIMITED, tuple(members))


def _slow_links(found: Sequence[Link]) -> Iterator[Deviation]:
    best = best_rates(found)
    for link in found:
        if link.state != MEASURED:
            continue
        first, second = (best[rank] for rank in link.ranks)
        if link.rate < SLOW * min(first, second):
            text = (
                f"{_named(link)}: {shown(link.rate)} each way; with other hosts they reach "
                f"{shown(first)} and {shown(second)}"
            )
            yield Deviation("slow link", text, Verdict.LIMITED, link.ranks)


def shown(rate: float) -> str:
    """Bytes per second as ``98.5 Mbit/s``."""
    bits = 8 * rate
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _named(link: Link) -> str:
    return f"hosts {link.hosts[0]} and {link.hosts[1]} (ranks {link.ranks[0]} and {link.ranks[1]})"


def _other(link: Link, rank: int) -> str:
    return link.hosts[1] if link.ranks[0] == rank else link.hosts[0]
