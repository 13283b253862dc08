"""One page of plain text: why a job hangs, where each rank is, and what to do next."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from deepspeed_smddp.diagnostics.report import analysis, connections, slowness, tables
from deepspeed_smddp.diagnostics.report.cause import Cause, Weight
from deepspeed_smddp.diagnostics.report.dump import Dump
from deepspeed_smddp.diagnostics.report.job import Job
from deepspeed_smddp.diagnostics.report.wording import count, cut, rank_list

LINES = 60
COLUMNS = 100
_WHY_LINES = 9
_ALSO_LINES = 3
_CONNECTION_LINES = 2
_ALSO = 5
_FEWEST_ROWS = 2  # that a list keeps when the page gets full


@dataclass
class Section:
    """A title and rows below it, each of one or more lines; ``more`` further rows are not shown."""

    title: str
    rows: list[list[str]]
    more: int = 0
    thing: str = "row"

    @property
    def height(self) -> int:
        """Its lines, with the empty one above it."""
        if not self.rows:
            return 0
        return 2 + sum(map(len, self.rows)) + bool(self.more)

    def lines(self) -> list[str]:
        """What is printed."""
        if not self.rows:
            return []
        shown = ["", self.title, *(line for row in self.rows for line in row)]
        return [*shown, f"  and {count(self.more, f'more {self.thing}')}"] if self.more else shown


def page(
    dumps: Mapping[int, Dump],
    gone: Mapping[int, str],
    ranks: int,
    folder: str = "",
    unreached: str = "",
) -> str:
    """The report of a job, at most 60 lines of 100 columns, but for the one with the folder.

    ``dumps`` are by global rank, ``gone`` holds a sentence about each rank known to be gone or
    silent, ``ranks`` is the size of the world. ``folder`` is where the dumps lie. ``unreached``
    says why the other ranks could not be asked; "" if they had their time.
    """
    job = Job(dumps, gone, ranks)
    found = analysis.causes(job, unreached)
    first, others = found[0], found[1:]
    head = [*_headline(job), "", *_wrapped(f"Why: {first.text}.", "     ", _WHY_LINES)]
    sections = [
        _section("Also:", _listed([f"{c.text}." for c in others], _ALSO_LINES), _ALSO),
        _table(job, found),
        _section("Who waits for whom:", _single(tables.waits(job)), 6),
        _section("Connections:", _listed(connections.rows(job), _CONNECTION_LINES), 6),
        _section("First difference between ranks:", _single(tables.differences(job)), 6),
        _section(
            "Before that (in wait(), for a rank to start; rates of single large flows):",
            _single(slowness.rows([slowness.of_dump(d) for d in job.dumps.values()], job.hosts)),
            8,
        ),
        _section("Lines of the program:", _single(tables.program(job, _suspects(found))), 8),
    ]
    tail = _tail(found)
    _fit(sections, LINES - 1 - len(head) - len(tail))
    body = [line for section in sections for line in section.lines()]
    text = "\n".join(cut_line(line) for line in [*head, *body, *tail]) + "\n"
    if not folder:
        return text
    return f"{text}{'' if tail else chr(10)}Full dumps: {folder}\n"


def cut_line(line: str) -> str:
    """A line of at most 100 columns, without characters that move a terminal's cursor."""
    line = "".join(c if c.isprintable() else "?" for c in line).rstrip()
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."


def _headline(job: Job) -> list[str]:
    dumps = list(job.dumps.values())
    names = list(dict.fromkeys(d.job for d in dumps if d.job))
    hosts = len({d.host for d in dumps})
    text = f"Hang report{f' of job {names[0]}' if names else ''}: {count(job.ranks, 'rank')}"
    text += f", {count(len(dumps), 'dump')} from {count(hosts, 'host')}"
    if not dumps:
        return [cut_line(text)]
    text += f", {_clock(min(d.time for d in dumps))}"
    asked = min(dumps, key=lambda d: (not d.reason, d.time))
    alike = [d.rank for d in dumps if d.reason == asked.reason]
    lines = [text]
    if asked.reason:
        lines.append(cut(f"Asked for: {asked.reason} ({rank_list(alike)})", COLUMNS))
    if job.several_hosts:
        lines.append("Times of a rank are by its own host's clock.")
    return lines


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def _wrapped(text: str, indent: str, most: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        COLUMNS,
        subsequent_indent=indent,
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _listed(rows: list[str], most: int) -> list[list[str]]:
    return [_wrapped(f"- {row}", "  ", most) for row in rows]


def _single(rows: list[str]) -> list[list[str]]:
    return [[f"  {row}"] for row in rows]


def _section(title: str, rows: list[list[str]], most: int, thing: str = "row") -> Section:
    return Section(title, rows[:most], max(len(rows) - most, 0), thing)


def _table(job: Job, found: list[Cause]) -> Section:
    header, rows, rest = tables.where(job, _suspects(found))
    return Section(
        "Where each rank is (since: time in the operation, or since the last call of one):",
        [[f"  {row}"] for row in [header, *rows]] if rows else [],
        rest,
    )


def _suspects(found: list[Cause]) -> set[int]:
    return {rank for cause in found if cause.weight < Weight.NOTE for rank in cause.ranks}


def _tail(found: list[Cause]) -> list[str]:
    advice = next((c.remedy for c in found if c.remedy and c.weight < Weight.NOTE), "")
    lines = [""]
    if advice:
        lines += _wrapped(f"What to do: {advice}.", "  ", 3)
    return lines if len(lines) > 1 else []


def _fit(sections: list[Section], room: int) -> None:
    """Drop last rows of the longest sections until all fit."""
    while sum(section.height for section in sections) > room:
        longest = max(sections, key=lambda s: (len(s.rows) > _FEWEST_ROWS, s.height))
        if not longest.rows:
            return
        longest.rows.pop()
        longest.more += 1
