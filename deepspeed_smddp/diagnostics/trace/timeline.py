"""What each rank of a job did when, on one clock: waits, compute and collectives in flight.

Ranks of one host share its clock. One rank of every other host has asked rank 0 for the time
(``rank_ports.measure``). Where none has, collectives say it: on no rank does an AllGather,
ReduceScatter, AllReduce or barrier end before the last rank has called it. With o as the offset of
a host's clock, two hosts A and B and any such collective,

    call_B - o_B <= end_A - o_A    and    call_A - o_A <= end_B - o_B,

so that o_A - o_B lies between the largest call_A - end_B and the smallest end_A - call_B, over all
collectives. As with a ping, the middle is the estimate, and half the width its uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from deepspeed_smddp.diagnostics.report.dump import Dump, DumpError, Operation
from deepspeed_smddp.intervals import common, union, without

Span = tuple[float, float]
# All members of the group take part in these, and each of them gets something from all others.
_ALL_WITH_ALL = ("all_gather", "reduce_scatter", "all_reduce", "barrier")


@dataclass(frozen=True)
class HostClock:
    """The clock of a host: what it shows minus what the reference shows, in seconds.

    The true offset lies within ``uncertainty`` of ``offset``; infinite if nothing bounds it.
    ``source`` says in words where the two come from, ``warning`` that the record contradicts them.
    """

    host: str
    offset: float = 0.0
    uncertainty: float = 0.0
    source: str = "the reference"
    warning: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the uncertainty is bounded."""
        return math.isfinite(self.uncertainty)

    @property
    def text(self) -> str:
        """``+3.20 ms, within 0.05 ms``, for people."""
        if not self.is_known:
            return "not known"
        return f"{self.offset * 1e3:+.3f} ms, within {self.uncertainty * 1e3:.3f} ms"


@dataclass
class _Times:
    """One collective on one host: the last call and the first end of its ranks."""

    call: float = -math.inf
    end: float = math.inf


_Collectives = list[dict[str, _Times]]


def host_clocks(dumps: Mapping[int, Dump]) -> dict[str, HostClock]:
    """The clock of each host that has left a dump, by its name.

    The reference is the clock of rank 0, which ranks ask; without a dump of a rank that was asked
    or has asked, that of the lowest rank.
    """
    hosts = list(dict.fromkeys(dump.host for _, dump in sorted(dumps.items())))
    collectives = list(_collectives(dumps))
    reference = dumps[0].host if 0 in dumps else None
    clocks = {} if reference is None else {reference: HostClock(reference)}
    for dump in dumps.values():
        asked = dump.clock
        if asked is not None and dump.host not in clocks:
            source = f"{asked.round_trips} round trips to rank 0"
            clock = HostClock(dump.host, asked.offset, asked.uncertainty, source)
            clocks[dump.host] = _checked(clock, reference, collectives)
    if not clocks and hosts:
        clocks[hosts[0]] = HostClock(hosts[0])
    _place_others(hosts, clocks, collectives)
    return {host: clocks[host] for host in hosts}


def _between(first: str, second: str | None, collectives: _Collectives) -> tuple[float, float]:
    """Between which values the clock of the first host minus that of the second lies.

    Infinite without a bound; the low value is above the high one if the clocks have drifted.
    """
    low, high = -math.inf, math.inf
    for times in collectives:
        if first in times and second in times:
            low = max(low, times[first].call - times[second].end)
            high = min(high, times[first].end - times[second].call)
    return low, high


def _collectives(dumps: Mapping[int, Dump]) -> Iterator[dict[str, _Times]]:
    """For each collective that several hosts have in their rings, its times by host."""
    found: dict[tuple[str, tuple[int, ...], int, str], dict[str, _Times]] = {}
    for dump in dumps.values():
        members = {group.name: tuple(group.members) for group in dump.groups}
        for op in dump.operations:
            if op.operation not in _ALL_WITH_ALL or op.sequence == 0 or op.bytes == 0:
                continue
            key = (op.group, members.get(op.group, ()), op.sequence, op.operation)
            times = found.setdefault(key, {}).setdefault(dump.host, _Times())
            if op.called is not None:
                times.call = max(times.call, op.called)
            if op.last_byte is not None and op.state == "done":
                times.end = min(times.end, op.last_byte)
    return (times for times in found.values() if len(times) > 1)


def _checked(clock: HostClock, reference: str | None, collectives: _Collectives) -> HostClock:
    """The clock, with a larger uncertainty if the collectives contradict it."""
    low, high = _between(clock.host, reference, collectives)
    beyond = max(low - clock.offset, clock.offset - high) - clock.uncertainty
    if beyond <= 0:
        return clock
    return replace(
        clock,
        uncertainty=clock.uncertainty + beyond,
        warning=f"during the record this clock and the reference drifted by {beyond * 1e3:.3g} ms",
    )


def _place_others(
    hosts: list[str], clocks: dict[str, HostClock], collectives: _Collectives
) -> None:
    """Adds the hosts of which no rank has asked, the surest ones first."""
    while others := [host for host in hosts if host not in clocks]:
        ways = []
        for known in clocks.values():
            for host in others:
                low, high = _between(host, known.host, collectives)
                if math.isfinite(high - low):
                    uncertainty = known.uncertainty + abs(high - low) / 2
                    ways.append((uncertainty, host, known.host, known.offset + (low + high) / 2))
        if not ways:
            for host in others:
                clocks[host] = HostClock(host, 0.0, math.inf, "nothing: taken as equal")
            return
        uncertainty, host, via, offset = min(ways)
        clocks[host] = HostClock(host, offset, uncertainty, f"collectives with {via}")


def lanes(spans: Sequence[Span]) -> list[int]:
    """A lane from 0 on for each span, given in the order of their starts.

    No two spans of a lane overlap, and there are as few lanes as spans that overlap at one time.
    """
    ends: list[float] = []  # of the last span of each lane
    chosen = []
    for start, end in spans:
        lane = next((lane for lane, last in enumerate(ends) if last <= start), len(ends))
        ends[lane : lane + 1] = [end]
        chosen.append(lane)
    return chosen


@dataclass(frozen=True)
class Flight:
    """A collective of one rank: from its call to its last byte, in seconds of the one clock.

    ``wait`` is the time that a thread stood in the wait for it, None if it was complete before.
    ``members`` are the ranks of its group. ``end_known`` is false if it has not ended, or
    the record does not say when.
    """

    operation: Operation
    members: tuple[int, ...]
    span: Span
    wait: Span | None
    end_known: bool

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Equal on all ranks that take part in the same collective."""
        return self.operation.group, self.members, self.operation.sequence


@dataclass
class RankTimeline:
    """One rank. ``complete_from``: since when all its operations are in the record.

    ``forgotten`` operations are older than those that the ring still held. ``steps`` of the
    training, by number, go from the end of the one before to their own.
    """

    rank: int
    host: str
    flights: list[Flight]
    complete_from: float
    forgotten: int
    steps: dict[int, Span]

    @cached_property
    def waits(self) -> list[Span]:
        """The times in which a thread stood in a wait."""
        return union(flight.wait for flight in self.flights if flight.wait is not None)

    @cached_property
    def in_flight(self) -> list[Span]:
        """The times in which a collective was under way."""
        return union(flight.span for flight in self.flights)

    @property
    def compute(self) -> list[Span]:
        """The times between waits, from the first call of the record on."""
        whole = [*self.in_flight, *self.waits]
        last = max((end for _, end in whole), default=0.0)
        return without([(self.flights[0].span[0], last)], self.waits) if whole else []

    def parts(self, span: Span) -> dict[str, list[Span]]:
        """A span's times of ``compute`` (between waits), ``waits``, ``in_flight``, and ``hidden``.

        The last is communication that no thread waited for.
        """
        waits, in_flight = common(self.waits, [span]), common(self.in_flight, [span])
        return {
            "compute": without([span], waits),
            "hidden": without(in_flight, waits),
            "waits": waits,
            "in_flight": in_flight,
        }


@dataclass
class Timeline:
    """All ranks on the reference's clock. ``missing`` ranks have left no dump."""

    job: str
    ranks: dict[int, RankTimeline]
    missing: list[int]
    clocks: dict[str, HostClock]

    @property
    def zero(self) -> float:
        """The earliest time in the record, in unix seconds of the reference."""
        firsts = [line.flights[0].span[0] for line in self.ranks.values() if line.flights]
        return min(firsts, default=0.0)

    def last_calls(self) -> dict[object, tuple[float, int]]:
        """For each collective of several ranks, by its key, the last call: its time and rank."""
        last: dict[object, tuple[float, int]] = {}
        for line in self.ranks.values():
            for flight in line.flights:
                if flight.operation.sequence > 0:
                    call = (flight.span[0], line.rank)
                    known = last.get(flight.key, call)
                    last[flight.key] = max(known, call, key=lambda c: c[0])
        return last

    def steps(self) -> dict[int, Span]:
        """The steps that all ranks have whole in their records: from first start to last end."""
        found: dict[int, list[Span]] = {}
        for line in self.ranks.values():
            for number, span in line.steps.items():
                if span[0] >= line.complete_from:
                    found.setdefault(number, []).append(span)
        return {
            number: (min(start for start, _ in spans), max(end for _, end in spans))
            for number, spans in sorted(found.items())
            if len(spans) == len(self.ranks)
        }

    def step(self, number: int) -> Span:
        """The time of a step.

        Raises:
            DumpError: the records do not hold it on all ranks.
        """
        steps = self.steps()
        if not any(line.steps for line in self.ranks.values()):
            raise DumpError(
                "the dumps know no steps: a report has to be made after the second step of a "
                "DeepSpeed engine or of an optimizer of torch"
            )
        if number not in steps:
            raise DumpError(
                f"step {number} is not whole in the records of all ranks; these are: "
                f"{', '.join(map(str, steps)) or 'none'}. SMDDP_DEBUG=flight_recorder=... lets the "
                "records hold more"
            )
        return steps[number]


def timeline(dumps: Mapping[int, Dump]) -> Timeline:
    """The dumps of the ranks of one job, on one clock."""
    clocks = host_clocks(dumps)
    ranks = {r: _of_rank(dump, clocks[dump.host].offset) for r, dump in sorted(dumps.items())}
    size = max((dump.ranks for dump in dumps.values()), default=0)
    job = next((dump.job for dump in dumps.values()), "")
    return Timeline(job, ranks, [r for r in range(size) if r not in dumps], clocks)


def _of_rank(dump: Dump, offset: float) -> RankTimeline:
    members = {group.name: tuple(group.members) for group in dump.groups}
    until = dump.time - offset
    flights = [
        _flight(op, members.get(op.group, ()), offset, until)
        for op in dump.operations
        if op.called is not None
    ]
    flights.sort(key=lambda flight: flight.span)
    forgotten = min((op.id for op in dump.operations), default=1) - 1
    complete_from = -math.inf
    if forgotten:
        complete_from = flights[0].span[0] if flights else until
    steps = {
        this.number: (before.ended - offset, this.ended - offset)
        for before, this in pairwise(dump.steps)
    }
    return RankTimeline(dump.rank, dump.host, flights, complete_from, forgotten, steps)


def _flight(op: Operation, members: tuple[int, ...], offset: float, until: float) -> Flight:
    events = (op.called, op.started, op.first_byte, op.wait_entered, op.wait_left)
    known = [time - offset for time in events if time is not None]
    # One that runs goes on until the dump. Of an operation of Gloo or NCCL that has ended the wait
    # says until when it lasted at most.
    end = until if op.state in ("queued", "running") else max(known)
    if op.last_byte is not None:
        end = op.last_byte - offset
    wait = None
    if op.wait_entered is not None:
        left = end if op.wait_left is None else op.wait_left - offset
        wait = (op.wait_entered - offset, max(op.wait_entered - offset, left))
    return Flight(op, members, (known[0], max(known[0], end)), wait, op.last_byte is not None)
