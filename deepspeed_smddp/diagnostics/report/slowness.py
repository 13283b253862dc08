"""Who is slow while nothing fails: for which rank the others wait, and which link has a low rate.

Each rank counts by its own clock, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from deepspeed_smddp.config.units import number_text
from deepspeed_smddp.diagnostics.report.dump import Dump, Group, Peer
from deepspeed_smddp.diagnostics.report.wording import count, rank_list, seconds

# A rank or a link is named if it costs the others a larger part of the time than this.
COSTLY = 0.2
# A pair of hosts is slow if its rate is below this part of what the fastest quarter of pairs has.
_SLOW = 0.8
_FASTEST = 0.75
# A host's link is named if pairs of hosts with it make up more than this part of all that is lost.
_MOST_OF_IT = 0.7
_MOST_RANKS = 3
_MOST_LINKS = 4
_LEAST_SECONDS = 0.001  # that a rank was waited for, to be shown

Pair = tuple[str, str]  # hosts that send and receive


@dataclass
class Flows:
    """Large flows of one host to one rank: bytes, their seconds, those in which a caller waited."""

    bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, count: int, seconds: float, waited: float) -> None:
        """Counts further flows."""
        self.bytes += count
        self.seconds += seconds
        self.waited += waited

    @property
    def rate(self) -> float:
        """Bytes per second of one flow."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class Seen(BaseModel):
    """What one rank has counted in ``seconds``, over all its groups; ranks are global.

    ``late`` has the seconds that its callers waited for another rank to start, ``operations`` how
    many collectives that were, ``flows`` the flows to this rank by the host that sent them.
    """

    rank: int
    host: str
    seconds: float = 0.0
    late: dict[int, float] = {}
    operations: dict[int, int] = {}
    flows: dict[str, Flows] = {}

    def count(self, group: Group, before: Group | None = None) -> None:
        """Adds what a group of this rank has counted since ``before``."""
        known = {peer.rank: peer for peer in before.peers} if before is not None else {}
        hosts = dict(zip(group.members, group.hosts, strict=False))
        for peer in group.peers:
            old = known.get(peer.rank)
            if old is None or old.late > peer.late:  # the latter: another group of this name
                old = Peer(rank=peer.rank)
            if peer.late > old.late:
                waited = peer.late_seconds - old.late_seconds
                self.late[peer.rank] = self.late.get(peer.rank, 0.0) + waited
                calls = self.operations.get(peer.rank, 0)
                self.operations[peer.rank] = calls + peer.late - old.late
            if peer.flow_bytes > old.flow_bytes:
                self.flows.setdefault(hosts.get(peer.rank, "?"), Flows()).add(
                    peer.flow_bytes - old.flow_bytes,
                    peer.flow_seconds - old.flow_seconds,
                    peer.flow_waited_seconds - old.flow_waited_seconds,
                )


@dataclass(frozen=True)
class Slow:
    """A rank or a link that costs the others ``share`` of their time; ``who`` is its key."""

    who: str
    share: float
    text: str


def of_dump(dump: Dump) -> Seen:
    """What a rank has counted since its groups were made."""
    seen = Seen(rank=dump.rank, host=dump.host)
    for group in dump.groups:
        seen.count(group)
    return seen


def slow_ranks(ranks: Sequence[Seen]) -> list[Slow]:
    """Ranks for which others waited too long, the slowest first.

    Only ranks that exchange with a rank directly see when it starts. What a rank itself waited for
    others is no fault of its own.
    """
    found = []
    own = {seen.rank: _share(sum(seen.late.values()), seen.seconds) for seen in ranks}
    hosts = {seen.rank: seen.host for seen in ranks}
    for rank in {rank for seen in ranks for rank in seen.late}:
        others = [seen for seen in ranks if seen.late.get(rank, 0.0) > 0]
        share = _mean([_share(seen.late[rank], seen.seconds) for seen in others])
        if share - own.get(rank, 0.0) <= COSTLY:
            continue
        name = f"rank {rank} ({hosts[rank]})" if rank in hosts else f"rank {rank}"
        span = seconds(_mean([seen.seconds for seen in others]))
        waited = seconds(_mean([seen.late[rank] for seen in others]))
        calls = count(max(seen.operations.get(rank, 0) for seen in others), "collective")
        who = rank_list(seen.rank for seen in others)
        found.append(
            Slow(
                f"rank {rank}",
                share - own.get(rank, 0.0),
                f"{name} is slow: in the last {span} {who} waited {waited} ({share:.0%} of the "
                f"time) for it to start collectives, {calls} in all",
            )
        )
    return sorted(found, key=lambda slow: -slow.share)


def slow_links(ranks: Sequence[Seen]) -> list[Slow]:
    """The link of a host, or of a pair of hosts, that costs too much; the costliest first.

    A pair is compared with the fastest quarter of the pairs of hosts, so that it takes two pairs.
    """
    pairs = _pairs(ranks)
    if len(pairs) < 2:
        return []
    fast = sorted(flows.rate for flows in pairs.values())[math.ceil(_FASTEST * len(pairs)) - 1]
    slow = {pair: flows.rate for pair, flows in pairs.items() if flows.rate < _SLOW * fast}
    lost = {
        pair: {s.rank: _lost(s, pair[0], slow[pair] / fast) for s in ranks if s.host == pair[1]}
        for pair in slow
    }
    costs = {pair: sum(by_rank.values()) for pair, by_rank in lost.items()}
    for host in sorted({host for pair in slow for host in pair}):
        of_host = [pair for pair in slow if host in pair]
        others = {other for pair in of_host for other in pair} - {host}
        share = _share(sum(costs[pair] for pair in of_host), sum(costs.values()))
        if len(others) > 1 and share > _MOST_OF_IT:
            return _slow_host(host, {pair: slow[pair] for pair in of_host}, fast, ranks, lost)
    found = []
    for (source, target), value in slow.items():
        by_rank = lost[source, target]
        share = _mean(list(by_rank.values()))
        if share > COSTLY:
            text = f"the link from host {source} to host {target} is slow: a flow has "
            text += f"{rate(value)} there, {rate(fast)} between the fastest pairs of hosts"
            text += f"; {_cost(share, by_rank, ranks)}"
            found.append(Slow(f"link {source} {target}", share, text))
    return sorted(found, key=lambda link: -link.share)


def news(ranks: Sequence[Seen], said: set[str]) -> list[Slow]:
    """The slowest rank and the costliest link of an interval, if they were not those of the last.

    ``said`` has the keys of the last, and then those of this one.
    """
    found = slow_ranks(ranks)[:1] + slow_links(ranks)[:1]
    fresh = [slow for slow in found if slow.who not in said]
    said.clear()
    said.update(slow.who for slow in found)
    return fresh


def _slow_host(
    host: str,
    slow: Mapping[Pair, float],
    fast: float,
    ranks: Sequence[Seen],
    lost: Mapping[Pair, Mapping[int, float]],
) -> list[Slow]:
    """The ranks of the host wait for flows from all others, the others for those from the host."""
    sides: list[dict[int, float]] = [{}, {}]
    for pair in slow:
        for rank, part in lost[pair].items():
            side = sides[pair[1] == host]
            side[rank] = min(1.0, side.get(rank, 0.0) + part)
    side = max(sides, key=lambda by_rank: _mean(list(by_rank.values())))
    share = _mean(list(side.values()))
    if share <= COSTLY:
        return []
    low, high = rate(min(slow.values())), rate(max(slow.values()))
    shown = low if low == high else f"{low} to {high}"
    text = f"the link of host {host} is slow: a flow from it or to it has {shown}, "
    text += f"{rate(fast)} between the fastest pairs of hosts; {_cost(share, side, ranks)}"
    return [Slow(f"host {host}", share, text)]


def _cost(share: float, lost: Iterable[int], ranks: Sequence[Seen]) -> str:
    by = set(lost)
    span = seconds(_mean([seen.seconds for seen in ranks if seen.rank in by]))
    return f"{rank_list(by)} lost {share:.0%} of the last {span} by it"


def _lost(seen: Seen, source: str, part: float) -> float:
    """The part of its time that a rank would not have waited at the full rate."""
    flows = seen.flows.get(source)
    return _share(flows.waited, seen.seconds) * (1.0 - part) if flows is not None else 0.0


def _pairs(ranks: Iterable[Seen]) -> dict[Pair, Flows]:
    found: dict[Pair, Flows] = defaultdict(Flows)
    for seen in ranks:
        for source, flows in seen.flows.items():
            found[source, seen.host].add(flows.bytes, flows.seconds, flows.waited)
    return dict(found)


def rows(ranks: Sequence[Seen], hosts: Mapping[int, str]) -> list[str]:
    """For a report: the ranks that the others waited for most, and the slowest pairs of hosts.

    ``hosts`` are those of the ranks, also of such without a dump.
    """
    late = {
        rank: _mean([seen.late.get(rank, 0.0) for seen in ranks if seen.rank != rank])
        for rank in {rank for seen in ranks for rank in seen.late}
    }
    late = {rank: mean for rank, mean in late.items() if mean >= _LEAST_SECONDS}
    shown = [
        f"for rank {rank} ({hosts.get(rank, '?')}) the others waited {mean:.3f} s each, in "
        f"{count(max(seen.operations.get(rank, 0) for seen in ranks), 'collective')}"
        for rank, mean in sorted(late.items(), key=lambda item: -item[1])[:_MOST_RANKS]
    ]
    pairs = sorted(_pairs(ranks).items(), key=lambda item: item[1].rate)
    shown += [
        f"a flow from host {source} to host {target} had {rate(flows.rate)} ({flows.bytes:,} bytes)"
        for (source, target), flows in pairs[:_MOST_LINKS]
    ]
    if len(pairs) > _MOST_LINKS:
        shown.append(f"the fastest of {len(pairs)} pairs of hosts had {rate(pairs[-1][1].rate)}")
    return shown


def rate(value: float) -> str:
    """``112 MB/s``."""
    return f"{number_text(value / 1e6)} MB/s" if value < 1e9 else f"{number_text(value / 1e9)} GB/s"


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
