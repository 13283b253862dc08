"""A timeline to look at: events for Perfetto and chrome://tracing, and a picture of one step.

The events are of the Trace Event Format, in JSON. A rank is a process, its tracks are threads:
steps, compute, waits, then the collectives of each group. Operations in flight at the same time lie
on lanes of their own. Times are microseconds since the earliest call in the record, on the clock of
rank 0's host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.trace.timeline import (
    Flight,
    HostClock,
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
    """The whole file, for ``json.dump``, or what overlaps ``span``, in seconds of the one clock."""
    zero = timeline.zero if span is None else span[0]
    last = timeline.last_calls()
    events: list[Event] = []
    for line in timeline.ranks.values():
        events += _rank_events(line, timeline.clocks[line.host], zero, span, last)
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


def _rank_events(
    line: RankTimeline,
    clock: HostClock,
    zero: float,
    span: Span | None,
    last: Mapping[object, tuple[float, int]],
) -> Iterator[Event]:
    """What a rank did; its tracks are threads, of as many lanes as overlap in them."""

    def event(kind: str, name: str, **fields: Any) -> Event:
        return {"ph": kind, "pid": line.rank, "name": name, **fields}

    def is_shown(of: Span) -> bool:
        return span is None or (of[0] < span[1] and of[1] > span[0])

    yield event("M", "process_name", args={"name": f"rank {line.rank} ({line.host})"})
    yield event("M", "process_labels", args={"labels": f"clock {clock.text}"})
    yield event("M", "process_sort_index", args={"sort_index": line.rank})
    thread = 0
    for track, rows in _tracks(line, last).items():
        shown = [row for row in rows if is_shown(row[2])]
        of = lanes([row[2] for row in shown])
        for lane in range(max(of, default=0) + 1):
            name, tid = f"{track}, {lane + 1}" if lane else track, thread + lane + 1
            yield event("M", "thread_name", tid=tid, args={"name": name})
            yield event("M", "thread_sort_index", tid=tid, args={"sort_index": tid})
        for lane, (what, category, (start, end), args) in zip(of, shown, strict=True):
            times = {"ts": _us(start - zero), "dur": _us(end - start)}
            yield event("X", what, tid=thread + lane + 1, **times, cat=category, args=args)
        thread += max(of, default=0) + 1
        begin = line.complete_from
        if track == "compute" and line.forgotten and is_shown((begin, begin)):
            at: Event = {"s": "t", "tid": thread, "ts": _us(begin - zero), "cat": "record"}
            args = {"operations_before": line.forgotten}
            yield event("i", "the record begins", **at, args=args)


def _tracks(line: RankTimeline, last: Mapping[object, tuple[float, int]]) -> dict[str, list[Row]]:
    """The slices of each track by its name, in the order of their starts."""
    waits = sorted((f for f in line.flights if f.wait is not None), key=lambda f: f.wait or ())
    found: dict[str, list[Row]] = {
        "steps": [(f"step {number}", "step", span, {}) for number, span in line.steps.items()],
        "compute": [("compute", "compute", span, {}) for span in line.compute],
        "waits": [(f"wait: {_name(f)}", "wait", f.wait, _brief(f)) for f in waits if f.wait],
    }
    for flight in sorted(line.flights, key=lambda f: (f.key[:2], f.span)):
        group, members, _ = flight.key
        track = f"group {group}" + (f" of {len(members)} ranks" if members else "")
        row = (_name(flight), "collective", flight.span, _full(flight, last.get(flight.key)))
        found.setdefault(track, []).append(row)
    return found


def _full(flight: Flight, last: tuple[float, int] | None) -> Event:
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
    if last is not None:
        args["last_called_by_rank"] = last[1]
        args["last_called_after_us"] = _us(last[0] - flight.span[0])
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
        CommandError: the file can't be written.
    """
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
    output_files.save_picture(figure, path)
    return title


def _clocks(timeline: Timeline) -> str:
    """How sure the clocks are, for the picture."""
    if len(timeline.clocks) == 1:
        return "one host, one clock"
    within = max(clock.uncertainty for clock in timeline.clocks.values())
    if not math.isfinite(within):
        return "how far the clocks of the hosts are apart is not known"
    return f"clocks of the hosts equal within {within * 1e3:.3f} ms"
