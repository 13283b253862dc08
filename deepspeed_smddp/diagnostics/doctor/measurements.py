"""What the ranks measure together: cores, clocks and links; and the result over all ranks."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed_smddp.diagnostics.doctor import (
    clock_check,
    core_check,
    deviations,
    host_pairs,
    link_check,
    link_findings,
    pair_rate,
)
from deepspeed_smddp.diagnostics.doctor.deviations import Deviation
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.diagnostics.doctor.meeting import Meeting
from deepspeed_smddp.diagnostics.doctor.rank_facts import RankFacts

# Within this time all ranks have measured all: the links, the one pair that began last, the rest.
SECONDS = link_check.ALL_SECONDS + 3 * link_check.PAIR_SECONDS + 10.0


@dataclass(frozen=True)
class Plan:
    """Rank 0's decision: the rank of each host that measures; who answers about the time."""

    ranks: list[int]
    first_of_hosts: list[int]
    clock: str = ""
    most_rounds: int = host_pairs.MOST_ROUNDS


@dataclass
class Measured:
    """Over all ranks: cores by rank, clocks by the rank that asked, links; hosts left out."""

    cores: dict[int, core_check.Core] = field(default_factory=dict)
    clocks: dict[int, clock_check.Clock] = field(default_factory=dict)
    links: list[link_findings.Link] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    hosts: int = 0
    missing: list[int] = field(default_factory=list)
    network: str = ""
    network_source: str = ""
    stored: str = ""  # what an earlier job of these ranks has measured, with its date

    def deviations(self, ranks: Sequence[RankFacts]) -> list[Deviation]:
        """What is slow, blocked or far off, and ranks that did not finish."""
        return [
            *(_unfinished(rank, ranks) for rank in self.missing),
            *link_findings.judge(self.links, ranks),
            *core_check.judge(self.cores, ranks),
            *clock_check.judge(self.clocks, ranks),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data; rates are bytes per second each way, times are seconds."""
        return {
            "cores": {str(rank): core.to_json() for rank, core in self.cores.items()},
            "clocks": {str(rank): clock.to_json() for rank, clock in self.clocks.items()},
            "links": [link.to_json() for link in self.links],
            "hosts_not_measured": self.left_out,
            "network": self.network,
            "network_source": self.network_source,
            "stored_network": self.stored,
        }

    def sentences(self) -> Iterator[str]:
        """What was measured, for the page."""
        rates = [link.rate for link in self.links if link.state == link_check.MEASURED]
        pairs = self.hosts * (self.hosts - 1) // 2
        if rates:
            low, high = (link_findings.shown(rate) for rate in (min(rates), max(rates)))
            span = low if low == high else f"{low} to {high}"
            yield f"{len(rates)} of {pairs} links between hosts: {span} each way"
        if self.network:
            yield (
                f"the network between hosts is {self.network}, {self.network_source} "
                "(docs/dev/selector.md)"
            )
        if self.stored:
            yield f"a job of these ranks takes the network {self.stored}"
        if self.left_out:
            yield f"no links of {', '.join(self.left_out[:4])}: no rank there can measure"
        if self.cores:
            times = [core.seconds * 1e3 for core in self.cores.values()]
            yield f"the same work on every rank: {min(times):.1f} to {max(times):.1f} ms"
        known = [abs(clock.offset) for clock in self.clocks.values() if clock.offset is not None]
        if known:
            yield f"clocks of {len(known) + 1} hosts: at most {max(known) * 1e3:.2g} ms apart"


def taking_part(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """The ranks whose package measures as rank 0's does: those of its version."""

    def version(rank: RankFacts) -> str:
        return next((f.value for f in rank.facts if f.name == "deepspeed-smddp"), "")

    return [rank for rank in ranks if version(rank) == version(ranks[0])]


def plan(ranks: Sequence[RankFacts], clock: str) -> Plan:
    """The first rank of each host that has libfabric measures the links of its host."""
    able: dict[str, int] = {}
    first: dict[str, int] = {}
    for rank in taking_part(ranks):
        first.setdefault(rank.host_id, rank.rank)
        if any(fact.name == "libfabric" for fact in rank.facts):
            able.setdefault(rank.host_id, rank.rank)
    return Plan(sorted(able.values()), sorted(first.values()), clock)


def run(meeting: Meeting, decided: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part, as data for rank 0; all ranks call it at about the same time."""
    todo = Plan(**decided)
    core = core_check.run()
    asks = meeting.rank in todo.first_of_hosts and meeting.rank != todo.first_of_hosts[0]
    clock = clock_check.ask(todo.clock) if asks else None
    halves = link_check.run(meeting, todo.ranks, todo.most_rounds)
    return {
        "core": asdict(core),
        "clock": asdict(clock) if clock is not None else None,
        "links": [asdict(half) for half in halves],
    }


def stored_network(ranks: Sequence[RankFacts]) -> str:
    """What an earlier job of these ranks has measured, as this rank's host knows it, or ""."""
    from deepspeed_smddp import _C

    if len(plan(ranks, "").ranks) < 2 or os.environ.get("SMDDP_FABRIC_CURVE") != pair_rate.ANEW:
        return ""
    try:
        return _C.stored_network([rank.host_id for rank in ranks])
    except RuntimeError:  # its network can't be opened; the links say so
        return ""


def joined(
    parts: Mapping[int, Mapping[str, Any]], ranks: Sequence[RankFacts], stored: str = ""
) -> Measured:
    """The parts of all ranks together."""
    halves = {rank: [link_check.Half(**h) for h in part["links"]] for rank, part in parts.items()}
    hosts = {rank.host_id: rank.host for rank in ranks}
    measuring = set(plan(ranks, "").ranks)
    able = {rank.host_id for rank in ranks if rank.rank in measuring}
    known = [half for own in halves.values() for half in own if half.network]
    return Measured(
        {rank: core_check.Core(**part["core"]) for rank, part in parts.items()},
        {r: clock_check.Clock(**p["clock"]) for r, p in parts.items() if p["clock"] is not None},
        link_findings.links(halves, ranks),
        [name for host_id, name in hosts.items() if host_id not in able],
        len(hosts),
        sorted({rank.rank for rank in taking_part(ranks)} - set(parts)),
        _median_model([half.network for half in known]),
        "; ".join(sorted({half.network_source for half in known})),
        stored,
    )


def _median_model(models: Sequence[str]) -> str:
    """The median of each number of models as ``SMDDP_FABRIC_CURVE`` holds them; "" of none."""
    numbers = [[float(number) for number in model.split(",")] for model in models]
    return ",".join(f"{statistics.median(column):.4g}" for column in zip(*numbers, strict=True))


def _unfinished(rank: int, ranks: Sequence[RankFacts]) -> Deviation:
    text = (
        f"{deviations.named([rank], ranks)}: did not finish the measurement within "
        f"{SECONDS:.0f} s: see the output of its process"
    )
    return Deviation("ranks", text, Verdict.FAILED, (rank,))
