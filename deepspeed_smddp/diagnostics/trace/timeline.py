"""What each rank of a job did when, on one clock: waits, compute and collectives in flight."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from deepspeed_smddp.diagnostics.report.dump import Dump, Operation
from deepspeed_smddp.diagnostics.trace.clocks import HostClock, host_clocks

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The times that are in any of the spans; spans without a length are dropped."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The times that are in both sets."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(whole: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """The times of the first set that are not in the second."""
    if not whole:
        return []
    edges = [(-float("inf"), whole[0][0]), *removed, (whole[-1][1], float("inf"))]
    gaps = [(left[1], right[0]) for left, right in pairwise(edges) if left[1] < right[0]]
    return common(whole, gaps)


def length(spans: Iterable[Span]) -> float:
    """The seconds in a set."""
    return sum(end - start for start, end in spans)


def lanes(spans: Sequence[Span]) -> list[int]:
    """A lane from 0 on for each span, given in the order of their starts.

    No two spans of a lane overlap, and there are as few lanes as spans that overlap at one time.
    """
    free: list[int] = []
    taken: list[tuple[float, int]] = []  # end, lane
    chosen, made = [], 0
    for start, end in spans:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, made = made, made + 1
        heapq.heappush(taken, (end, lane))
        chosen.append(lane)
    return chosen


class TimelineError(Exception):
    """The dumps make no timeline, or none of what is asked for; one sentence says why."""


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


@dataclass(frozen=True)
class Step:
    """A step of the training, from the end of the one before to its own."""

    number: int
    span: Span


@dataclass
class Shares:
    """Seconds of one rank in a span: in flight, of these hidden or waited for; compute."""

    in_flight: float
    exposed: float
    waits: float
    compute: float

    @property
    def hidden(self) -> float:
        """Communication that no thread waited for."""
        return self.in_flight - self.exposed


@dataclass
class RankTimeline:
    """One rank. ``complete_from``: since when all its operations are in the record.

    ``forgotten`` operations are older than those that the ring still held.
    """

    rank: int
    host: str
    flights: list[Flight]
    complete_from: float
    forgotten: int
    steps: list[Step] = field(default_factory=list)

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

    def shares(self, span: Span) -> Shares:
        """What the rank did in a span."""
        flight, waits = common(self.in_flight, [span]), common(self.waits, [span])
        return Shares(
            in_flight=length(flight),
            exposed=length(common(flight, waits)),
            waits=length(waits),
            compute=length(without([span], waits)),
        )


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
                call = (flight.span[0], line.rank)
                if flight.operation.sequence > 0 and (
                    flight.key not in last or call[0] > last[flight.key][0]
                ):
                    last[flight.key] = call
        return last

    def steps(self) -> dict[int, dict[int, Step]]:
        """By number, each rank's time of the steps that all ranks have whole in their records."""
        found: dict[int, dict[int, Step]] = {}
        for rank, line in self.ranks.items():
            for step in line.steps:
                if step.span[0] >= line.complete_from:
                    found.setdefault(step.number, {})[rank] = step
        return {n: of for n, of in sorted(found.items()) if len(of) == len(self.ranks)}

    def step(self, number: int | None) -> tuple[int, Span]:
        """A step's number and its time, from the first rank's start to the last one's end.

        Args:
            number: None takes the last one.

        Raises:
            TimelineError: the records do not hold it on all ranks.
        """
        steps = self.steps()
        if not any(line.steps for line in self.ranks.values()):
            raise TimelineError(
                "the dumps know no steps: a report has to be made after the second step of a "
                "DeepSpeed engine or of an optimizer of torch"
            )
        if not steps:
            raise TimelineError(
                "no step is whole in the records of all ranks: let SMDDP_DEBUG=flight_recorder=... "
                "hold more entries, a step's operations several times"
            )
        number = max(steps) if number is None else number
        if number not in steps:
            raise TimelineError(
                f"step {number} is not whole in the records of all ranks; these are: "
                f"{', '.join(map(str, steps))}"
            )
        spans = [step.span for step in steps[number].values()]
        return number, (min(start for start, _ in spans), max(end for _, end in spans))


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
    steps = [
        Step(this.number, (before.ended - offset, this.ended - offset))
        for before, this in pairwise(dump.steps)
    ]
    return RankTimeline(dump.rank, dump.host, flights, complete_from, forgotten, steps)


def _flight(op: Operation, members: tuple[int, ...], offset: float, until: float) -> Flight:
    events = (op.called, op.started, op.first_byte, op.wait_entered, op.wait_left)
    known = [time - offset for time in events if time is not None]
    if op.last_byte is not None:
        end = op.last_byte - offset
    else:
        # One that runs goes on until the dump. Of an operation of Gloo or NCCL that has ended the
        # wait says until when it lasted at most.
        end = until if op.state in ("queued", "running") else max(known)
    wait = None
    if op.wait_entered is not None:
        entered = op.wait_entered - offset
        left = end if op.wait_left is None else op.wait_left - offset
        wait = (entered, max(entered, left))
    return Flight(op, members, (known[0], max(known[0], end)), wait, op.last_byte is not None)
