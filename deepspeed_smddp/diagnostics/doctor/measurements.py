"""What the ranks measure together: cores, clocks and links; and the result over all ranks."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.units import number_text, rate_text
from deepspeed_smddp.diagnostics.doctor import coding_check, facts, links
from deepspeed_smddp.diagnostics.doctor.facts import Deviation, RankFacts
from deepspeed_smddp.diagnostics.doctor.rendezvous import Rendezvous
from deepspeed_smddp.diagnostics.rank_ports import Clock, measure
from deepspeed_smddp.distributed import extension

# Within this time all ranks have measured all: the links, the one pair that began last, the rest.
SECONDS = links.ALL_SECONDS + 3 * links.PAIR_SECONDS + 10.0
# A rank that takes longer than the median by this factor is slow.
SLOW_CORE = 1.5
# From this share of the time on, the rank waited for a core rather than computed slowly.
_WAITED = 0.3
_WORK = 8 << 20  # bytes to hash
_WORK_SECONDS = 0.4
_LEAST_ROUNDS = 3
# NTP keeps clocks within some milliseconds. Beyond this, logs of two hosts are hard to compare.
MOST_CLOCK_SECONDS = 0.1


@dataclass(frozen=True)
class Core:
    """The fastest of several rounds: its seconds, and which share of them it had no core."""

    seconds: float
    waited: float


@dataclass(frozen=True)
class Plan:
    """Rank 0's decision: the rank of each host that measures; who answers about the time."""

    ranks: list[int]
    first_of_hosts: list[int]
    clock: str = ""


@dataclass(frozen=True)
class Part:
    """What one rank has measured; one rank of each host asks rank 0's host for the time."""

    core: Core
    links: list[links.Half]
    clock: Clock | None = None


@dataclass
class Measured:
    """Over all ranks: cores by rank, clocks by the rank that asked, links.

    ``stored_network`` is what an earlier job of these ranks has measured, with its date.
    """

    cores: dict[int, Core] = field(default_factory=dict)
    clocks: dict[int, Clock] = field(default_factory=dict)
    links: list[links.Link] = field(default_factory=list)
    hosts_not_measured: list[str] = field(default_factory=list)
    hosts: int = 0
    missing: list[int] = field(default_factory=list)
    network: str = ""
    network_source: str = ""
    stored_network: str = ""
    coding: str = ""

    def deviations(self, ranks: Sequence[RankFacts]) -> list[Deviation]:
        """What is slow, blocked or far off, and ranks that did not finish."""
        text = f"did not finish the measurement within {SECONDS:.0f} s: see its process's output"
        return [
            *(
                facts.of_ranks("ranks", [r], ranks, text, facts.Verdict.FAILED)
                for r in self.missing
            ),
            *links.judge(self.links, ranks),
            *judge_cores(self.cores, ranks),
            *judge_clocks(self.clocks, ranks),
        ]

    def sentences(self) -> Iterator[str]:
        """What was measured, for the page."""
        rates = [link.bytes_per_second for link in self.links if link.state == links.MEASURED]
        pairs = self.hosts * (self.hosts - 1) // 2
        if rates:
            low, high = (rate_text(rate) for rate in (min(rates), max(rates)))
            span = low if low == high else f"{low} to {high}"
            yield f"{len(rates)} of {pairs} links between hosts: {span} each way"
        if self.network:
            yield (
                f"the network between hosts is {self.network}, {self.network_source} "
                "(docs/dev/one-allgather.md)"
            )
        if self.coding:
            yield f"coding between hosts: {self.coding}"
        if self.stored_network:
            yield f"a job of these ranks takes the network {self.stored_network}"
        if self.hosts_not_measured:
            yield f"no links of {', '.join(self.hosts_not_measured[:4])}: no rank there can measure"
        if self.cores:
            times = [core.seconds * 1e3 for core in self.cores.values()]
            yield f"the same work on every rank: {min(times):.1f} to {max(times):.1f} ms"
        if self.clocks:
            most = max(abs(clock.offset) for clock in self.clocks.values())
            apart = number_text(most * 1e3, 2)
            yield f"clocks of {len(self.clocks) + 1} hosts: at most {apart} ms apart"


def taking_part(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """The ranks whose package measures as rank 0's does: those of its version."""
    name = "deepspeed-smddp"
    return [rank for rank in ranks if rank.value(name) == ranks[0].value(name)]


def plan(ranks: Sequence[RankFacts], clock: str) -> Plan:
    """The first rank of each host that has libfabric measures the links of its host."""
    able: dict[str, int] = {}
    first: dict[str, int] = {}
    for rank in taking_part(ranks):
        first.setdefault(rank.host_id, rank.rank)
        if rank.value("libfabric"):
            able.setdefault(rank.host_id, rank.rank)
    return Plan(sorted(able.values()), sorted(first.values()), clock)


def run(rendezvous: Rendezvous, todo: Plan) -> Part:
    """This rank's part; all ranks call it at about the same time."""
    core = time_core()
    asks = rendezvous.rank in todo.first_of_hosts and rendezvous.rank != todo.first_of_hosts[0]
    clock = measure(todo.clock) if asks and todo.clock else None
    return Part(core, links.run(rendezvous, todo.ranks), clock)


def stored_network(ranks: Sequence[RankFacts]) -> str:
    """What an earlier job of these ranks has measured, as this rank's host knows it, or ""."""
    if len(plan(ranks, "").ranks) < 2 or settings.current().debug.curve != links.ANEW:
        return ""
    try:
        return extension.core.stored_network([rank.host_id for rank in ranks])
    except RuntimeError:  # its network can't be opened; the links say so
        return ""


def joined(parts: Mapping[int, Part], ranks: Sequence[RankFacts], stored: str = "") -> Measured:
    """The parts of all ranks together; the network is the median of those that pairs measured."""
    hosts = {rank.host_id: rank.host for rank in ranks}
    measuring = set(plan(ranks, "").ranks)
    able = {rank.host_id for rank in ranks if rank.rank in measuring}
    known = [half for part in parts.values() for half in part.links if half.network]
    models = [[float(number) for number in half.network.split(",")] for half in known]
    network = [statistics.median(column) for column in zip(*models, strict=True)]
    coding = ""
    if network:
        rate = network[2] * 1e9 * len(hosts) / len(ranks)
        coding = coding_check.choice(ranks[0].value("coding"), rate)
    return Measured(
        {rank: part.core for rank, part in parts.items()},
        {rank: part.clock for rank, part in parts.items() if part.clock is not None},
        links.links({rank: part.links for rank, part in parts.items()}, ranks),
        [name for host_id, name in hosts.items() if host_id not in able],
        len(hosts),
        sorted({rank.rank for rank in taking_part(ranks)} - set(parts)),
        ",".join(f"{number:.4g}" for number in network),
        "; ".join(sorted({half.network_source for half in known})),
        stored,
        coding,
    )


def time_core() -> Core:
    """Hashes the same bytes for 0.4 seconds. The fastest round counts: a core that another process
    keeps busy slows all of them, a short disturbance does not.
    """
    work = bytes(_WORK)
    fastest = Core(math.inf, 0.0)
    end = time.perf_counter() + _WORK_SECONDS
    done = 0
    while done < _LEAST_ROUNDS or time.perf_counter() < end:
        began, computed = time.perf_counter(), time.thread_time()
        hashlib.sha256(work).digest()
        seconds = time.perf_counter() - began
        if seconds < fastest.seconds:
            waited = 1 - (time.thread_time() - computed) / seconds
            fastest = Core(seconds, max(0.0, waited))
        done += 1
    return fastest


def judge_cores(cores: Mapping[int, Core], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    """The ranks that take longer than the median by ``SLOW_CORE``, with the likely cause."""
    if not cores:
        return
    median = statistics.median(core.seconds for core in cores.values())
    for rank, core in sorted(cores.items()):
        if core.seconds <= SLOW_CORE * median:
            continue
        cause = (
            f"it had no core for {core.waited:.0%} of the time: other processes, or other ranks, "
            "run on its cores"
            if core.waited > _WAITED
            else "it had its core all the time: the core is slower (its clock, power or heat)"
        )
        text = (
            f"the same work takes {core.seconds * 1e3:.1f} ms, the median of all ranks is "
            f"{median * 1e3:.1f} ms; {cause}"
        )
        yield facts.of_ranks("slow rank", [rank], ranks, text)


def judge_clocks(clocks: Mapping[int, Clock], ranks: Sequence[RankFacts]) -> Iterator[Deviation]:
    """Hosts whose clocks differ from rank 0's by more than the bound, for certain."""
    for rank, clock in sorted(clocks.items()):
        if abs(clock.offset) - clock.uncertainty <= MOST_CLOCK_SECONDS:
            continue
        direction = "ahead of" if clock.offset > 0 else "behind"
        text = (
            f"{number_text(abs(clock.offset))} s {direction} the clock of rank 0's host (within "
            f"{number_text(clock.uncertainty * 1e3, 2)} ms), so that times in logs of these hosts "
            "do not match: run chrony or another NTP client on all hosts"
        )
        yield facts.of_ranks("clock", facts.of_its_host(rank, ranks), ranks, text)
