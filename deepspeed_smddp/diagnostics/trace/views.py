"""A timeline to look at: events for Perfetto and chrome://tracing, and a picture of one step.

The events are of the Trace Event Format, in JSON. A rank is a process, its tracks are threads:
steps, compute, waits, then the collectives of each group. Operations in flight at the same time lie
on lanes of their own. Times are microseconds since the earliest call in the record, on the clock of
rank 0's host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from deepspeed_smddp.diagnostics import pictures
from deepspeed_smddp.diagnostics.trace.clocks import HostClock
from deepspeed_smddp.diagnostics.trace.timeline import (
    Flight,
    RankTimeline,
    Span,
    Timeline,
    lanes,
)
from deepspeed_smddp.intervals import length

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
        events += _RankEvents(line, timeline.clocks[line.host], zero, span, last).events
    about = {
        "job": timeline.job,
        "zero_unix_seconds": zero,
        "clocks": [
            {
                "host": clock.host,
                "offset_ms": round(clock.offset * 1e3, 6),
                "uncertainty_ms": round(clock.uncertainty * 1e3, 6) if clock.is_known else None,
                "from": clock.source,
                "warning": clock.warning,
            }
            for clock in timeline.clocks.values()
        ],
        "ranks_without_a_dump": timeline.missing,
        "complete_from_us": {
            str(line.rank): _us(line.complete_from - zero)
            for line in timeline.ranks.values()
            if line.forgotten
        },
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _RankEvents:
    """The events of one rank, in ``events``."""

    def __init__(
        self,
        line: RankTimeline,
        clock: HostClock,
        zero: float,
        span: Span | None,
        last: Mapping[object, tuple[float, int]],
    ) -> None:
        self.events: list[Event] = []
        self._line, self._zero, self._span, self._last = line, zero, span, last
        self._threads = 0
        self._about("process_name", name=f"rank {line.rank} ({line.host})")
        self._about("process_labels", labels=f"clock {clock.text}")
        self._about("process_sort_index", sort_index=line.rank)
        self._track("steps", ((f"step {n}", "step", of, {}) for n, of in line.steps.items()))
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
        self._add("M", name, **of, args=args)

    def _add(self, kind: str, name: str, **fields: Any) -> None:
        self.events.append({"ph": kind, "pid": self._line.rank, "name": name, **fields})

    def _track(self, name: str, rows: Iterable[Row]) -> None:
        """Slices in the order of their starts, on as many threads as overlap."""
        kept = [row for row in rows if self._shown(row[2])]
        of = lanes([row[2] for row in kept])
        first = self._threads + 1
        self._threads += max(of, default=0) + 1
        for lane, thread in enumerate(range(first, self._threads + 1)):
            self._about("thread_name", thread, name=f"{name}, {lane + 1}" if lane else name)
            self._about("thread_sort_index", thread, sort_index=thread)
        for lane, (what, category, (start, end), args) in zip(of, kept, strict=True):
            times = {"ts": _us(start - self._zero), "dur": _us(end - start)}
            self._add("X", what, tid=first + lane, **times, cat=category, args=args)

    def _shown(self, span: Span) -> bool:
        return self._span is None or (span[0] < self._span[1] and span[1] > self._span[0])

    def _begin_of_record(self) -> None:
        begin = self._line.complete_from
        if self._line.forgotten and self._shown((begin, begin)):
            at = {"s": "t", "tid": self._threads, "ts": _us(begin - self._zero)}
            args = {"operations_before": self._line.forgotten}
            self._add("i", "the record begins", **at, cat="record", args=args)

    def _full(self, flight: Flight) -> Event:
        op = flight.operation
        args = {**_brief(flight), "dtype": op.dtype, "path": op.path, "state": op.state}
        if op.parameters:
            args["parameters"] = op.parameters
        for name in ("started", "first_byte"):
            if (time := getattr(op, name)) is not None and op.called is not None:
                args[f"{name}_after_us"] = _us(time - op.called)
        args["waited_us"] = 0.0 if flight.wait is None else _us(flight.wait[1] - flight.wait[0])
        if not flight.end_known:
            args["end"] = "not known"
        if flight.key in self._last:
            time, rank = self._last[flight.key]
            args["last_called_by_rank"] = rank
            args["last_called_after_us"] = _us(time - flight.span[0])
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


# The parts of a rank's time that are rows, their colours, and what the legend says.
_ROWS = (
    ("compute", "#7aa6c2", "compute: between waits"),
    ("hidden", "#7fb77e", "hidden: in flight while no thread waits for it"),
    ("waits", "#d1495b", "waits: communication that is exposed"),
)
_ROW_HEIGHT = 0.26
_MOST_RANKS = 32


def draw(timeline: Timeline, title: str, span: Span, path: Path) -> str:
    """Draws what the ranks did in a span, in seconds of the reference's clock, into a file.

    Of more than 32 ranks the first are drawn; the title, which is returned, is about all.

    Raises:
        CommandError: matplotlib is missing, or the file can't be written.
    """
    pictures.check_available("a picture")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = list(timeline.ranks.values())
    parts, shown = [line.parts(span) for line in ranks], ranks[:_MOST_RANKS]
    figure = Figure(figsize=(11, 1.7 + 0.75 * len(shown)), dpi=130, layout="constrained")
    axes = figure.subplots()
    start, end = span
    for place in range(len(shown)):
        for row, (name, colour, _) in enumerate(_ROWS):
            times = parts[place][name]
            bars = [((begin - start) * 1e3, (stop - begin) * 1e3) for begin, stop in times]
            top = place + 0.1 + row * _ROW_HEIGHT
            axes.broken_barh(bars, (top, _ROW_HEIGHT * 0.94), facecolors=colour)
        if place > 0:
            axes.axhline(place, color="#bbbbbb", linewidth=0.6)
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_ylim(len(shown), 0)
    axes.set_yticks(
        [place + 0.5 for place in range(len(shown))],
        [f"rank {line.rank}\n{line.host}" for line in shown],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"milliseconds; {_clocks(timeline)}")
    hidden, whole = (1e3 * mean(length(p[k]) for p in parts) for k in ("hidden", "in_flight"))
    of = f" (mean of {len(ranks)} ranks)" if len(ranks) > 1 else ""
    title = f"{title}: hidden {hidden:.1f} of {whole:.1f} ms of communication{of}"
    axes.set_title(title, fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=label) for _, colour, label in _ROWS],
        loc="outside lower center",
        ncols=len(_ROWS),
        frameon=False,
        fontsize=9,
    )
    pictures.save(figure, path)
    return title


def _clocks(timeline: Timeline) -> str:
    """How sure the clocks are, for the picture."""
    if len(timeline.clocks) == 1:
        return "one host, one clock"
    within = max(clock.uncertainty for clock in timeline.clocks.values())
    if not math.isfinite(within):
        return "how far the clocks of the hosts are apart is not known"
    return f"clocks of the hosts equal within {within * 1e3:.3f} ms"
