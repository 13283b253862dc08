"""A timeline as events for Perfetto and chrome://tracing: the Trace Event Format, in JSON.

A rank is a process, its tracks are threads: steps, compute, waits, then the collectives of each
group. Operations in flight at the same time lie on lanes of their own. Times are microseconds
since the earliest call in the record, on the clock of rank 0's host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed_smddp.diagnostics.trace.clocks import HostClock
from deepspeed_smddp.diagnostics.trace.intervals import Span, lanes
from deepspeed_smddp.diagnostics.trace.timeline import Call, Flight, RankTimeline, Timeline

Event = dict[str, Any]
# What it is, its category, its time, its arguments.
Row = tuple[str, str, Span, Event]


def trace(timeline: Timeline, span: Span | None = None) -> dict[str, Any]:
    """The whole file, for ``json.dump``.

    Args:
        span: only what overlaps this time, in seconds of the reference's clock; None: all.
    """
    zero = timeline.zero if span is None else span[0]
    last = timeline.last_calls()
    events: list[Event] = []
    for line in timeline.ranks.values():
        clock = timeline.clocks[line.host]
        events.extend(_RankEvents(line, clock, zero, span, last).events)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(timeline, zero)}


def _about(timeline: Timeline, zero: float) -> dict[str, Any]:
    return {
        "job": timeline.job,
        "zero_unix_seconds": zero,
        "clocks": [_described(clock) for clock in timeline.clocks.values()],
        "ranks_without_a_dump": timeline.missing,
        "complete_from_us": {
            str(line.rank): _us(line.complete_from - zero)
            for line in timeline.ranks.values()
            if line.forgotten
        },
    }


def _described(clock: HostClock) -> dict[str, Any]:
    sure = clock.uncertainty
    return {
        "host": clock.host,
        "offset_ms": round(clock.offset * 1e3, 6),
        "uncertainty_ms": None if sure is None else round(sure * 1e3, 6),
        "from": clock.source,
        "warning": clock.warning,
    }


class _RankEvents:
    """The events of one rank, in ``events``."""

    def __init__(
        self,
        line: RankTimeline,
        clock: HostClock,
        zero: float,
        span: Span | None,
        last: dict[object, Call],
    ) -> None:
        self.events: list[Event] = []
        self._line, self._zero, self._span, self._last = line, zero, span, last
        self._threads = 0
        self._about("process_name", name=f"rank {line.rank} ({line.host})")
        self._about("process_labels", labels=f"clock {clock.text}")
        self._about("process_sort_index", sort_index=line.rank)
        self._track("steps", ((f"step {s.number}", "step", s.span, {}) for s in line.steps))
        self._track("compute", (("compute", "compute", span, {}) for span in line.compute))
        self._begin_of_record()
        waits = [(flight.wait, flight) for flight in line.flights if flight.wait is not None]
        waits.sort(key=lambda wait: wait[0])
        self._track("waits", ((f"wait: {_name(f)}", "wait", wait, _brief(f)) for wait, f in waits))
        by_group: dict[tuple[str, tuple[int, ...]], list[Flight]] = {}
        for flight in line.flights:
            by_group.setdefault(flight.key[:2], []).append(flight)
        for (group, members), flights in sorted(by_group.items()):
            size = f" of {len(members)} ranks" if members else ""
            rows = ((_name(f), "collective", f.span, self._full(f)) for f in flights)
            self._track(f"group {group}{size}", rows)

    def _about(self, name: str, thread: int | None = None, /, **args: Any) -> None:
        of = {} if thread is None else {"tid": thread}
        self.events.append({"ph": "M", "pid": self._line.rank, **of, "name": name, "args": args})

    def _track(self, name: str, rows: Iterable[Row]) -> None:
        """Slices in the order of their starts, on as many threads as overlap."""
        kept = [row for row in rows if self._shown(row[2])]
        of = lanes([row[2] for row in kept])
        first = self._threads + 1
        self._threads += max(of, default=0) + 1
        for lane in range(self._threads + 1 - first):
            thread = first + lane
            self._about("thread_name", thread, name=f"{name}, {lane + 1}" if lane else name)
            self._about("thread_sort_index", thread, sort_index=thread)
        for lane, (what, category, (start, end), args) in zip(of, kept, strict=True):
            slice_ = {"ph": "X", "pid": self._line.rank, "tid": first + lane, "name": what}
            times = {"ts": _us(start - self._zero), "dur": _us(end - start)}
            self.events.append({**slice_, **times, "cat": category, "args": args})

    def _shown(self, span: Span) -> bool:
        return self._span is None or (span[0] < self._span[1] and span[1] > self._span[0])

    def _begin_of_record(self) -> None:
        begin = self._line.complete_from
        if not self._line.forgotten or not self._shown((begin, begin)):
            return
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "pid": self._line.rank,
                "tid": self._threads,
                "ts": _us(begin - self._zero),
                "name": "the record begins",
                "cat": "record",
                "args": {"operations_before": self._line.forgotten},
            }
        )

    def _full(self, flight: Flight) -> Event:
        op = flight.operation
        args = {**_brief(flight), "dtype": op.dtype, "path": op.path, "state": op.state}
        if op.parameters:
            args["parameters"] = op.parameters
        for name, time in (
            ("started_after_us", op.started),
            ("first_byte_after_us", op.first_byte),
        ):
            if time is not None and op.called is not None:
                args[name] = _us(time - op.called)
        args["waited_us"] = 0.0 if flight.wait is None else _us(flight.wait[1] - flight.wait[0])
        if not flight.end_known:
            args["end"] = "not known"
        last = self._last.get(flight.key)
        if last is not None:
            args["last_called_by_rank"] = last.rank
            args["last_called_after_us"] = _us(last.time - flight.span[0])
        return args


def _name(flight: Flight) -> str:
    op = flight.operation
    return f"{op.operation}: {op.label}" if op.label else f"{op.operation} #{op.sequence}"


def _brief(flight: Flight) -> Event:
    op = flight.operation
    args = {"group": op.group, "seq": op.sequence, "operation": op.operation, "bytes": op.bytes}
    return {**args, "caller": op.label or "user code"}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
