"""One page of plain text: why a job hangs, where each rank is, and what to do next."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from deepspeed_smddp.diagnostics.report import LINK, slowness
from deepspeed_smddp.diagnostics.report.causes import causes, missing_bytes
from deepspeed_smddp.diagnostics.report.differences import job_differences
from deepspeed_smddp.diagnostics.report.dump import Connection, Dump, Operation
from deepspeed_smddp.diagnostics.report.job import Job, Weight
from deepspeed_smddp.diagnostics.report.wording import (
    count,
    cut,
    rank_list,
    seconds,
    size,
    span,
    verb,
)

LINES = 60
COLUMNS = 100
_WHY_LINES = 9
_MOST_ROWS = 12  # of the table
_FEWEST_ROWS = 2  # that a list keeps when the page gets full
_MOST_WIDTHS = (24, 16, 28)  # of ranks, host and last finished; "now" takes what is left
_MOST_SOURCES = 3
# The worst first. A rank that has left the group has raised an error, or ended: others say so.
_TOLD = ("ended", "lost", "stopped", "silent", "no message yet")


@dataclass
class Section:
    """A title and rows below it, each of one or more lines; ``more`` further rows are not shown."""

    title: str
    rows: list[list[str]]
    more: int = 0

    def lines(self) -> list[str]:
        """What is printed, with an empty line above it."""
        if not self.rows:
            return []
        shown = ["", self.title, *(line for row in self.rows for line in row)]
        return [*shown, f"  and {count(self.more, 'more row')}"] if self.more else shown


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
    found = causes(job, unreached)
    suspects = {rank for cause in found if cause.weight < Weight.NOTE for rank in cause.ranks}
    head = [*_headline(job), "", *_wrapped(f"Why: {found[0].text}.", "     ", _WHY_LINES)]
    slow = slowness.rows([slowness.of_dump(d) for d in job.dumps.values()], job.hosts)
    sections = [
        _section("Also:", (f"{cause.text}." for cause in found[1:]), 5, lines=3),
        _table(job, suspects),
        _section("Who waits for whom:", _waits(job), 6),
        _section("Connections:", [*_links(job), *_connections(job)], 6, lines=2),
        _section("First difference between ranks:", _differences(job), 6),
        _section(
            "Before that (in wait(), for a rank to start; rates of single large flows):", slow, 8
        ),
        _section("Lines of the program:", _program(job, suspects), 8),
    ]
    advice = next((c.remedy for c in found if c.remedy and c.weight < Weight.NOTE), "")
    tail = ["", *_wrapped(f"What to do: {advice}.", "  ", 3)] if advice else []
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


def _section(title: str, rows: Iterable[str], most: int, lines: int = 1) -> Section:
    """At most so many rows; those of several lines have a dash in front of them."""
    whole = list(rows)
    shown = [[f"  {r}"] if lines == 1 else _wrapped(f"- {r}", "  ", lines) for r in whole[:most]]
    return Section(title, shown, max(len(whole) - most, 0))


def _wrapped(text: str, indent: str, most: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        COLUMNS,
        subsequent_indent=indent,
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _fit(sections: list[Section], height: int) -> None:
    """Drops last rows of the longest sections until all fit."""
    while sum(len(section.lines()) for section in sections) > height:
        longest = max(sections, key=lambda s: (len(s.rows) > _FEWEST_ROWS, len(s.lines())))
        if not longest.rows:
            return
        longest.rows.pop()
        longest.more += 1


def _headline(job: Job) -> list[str]:
    dumps = list(job.dumps.values())
    names = list(dict.fromkeys(d.job for d in dumps if d.job))
    hosts = len({d.host for d in dumps})
    text = f"Hang report{f' of job {names[0]}' if names else ''}: {count(job.ranks, 'rank')}"
    text += f", {count(len(dumps), 'dump')} from {count(hosts, 'host')}"
    if not dumps:
        return [cut_line(text)]
    lines = [f"{text}, {_clock(min(d.time for d in dumps))}"]
    asked = min(dumps, key=lambda d: (not d.reason, d.time))
    if asked.reason:
        alike = rank_list(d.rank for d in dumps if d.reason == asked.reason)
        lines.append(cut(f"Asked for: {asked.reason} ({alike})", COLUMNS))
    if job.several_hosts:
        lines.append("Times of a rank are by its own host's clock.")
    return lines


def _clock(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def _table(job: Job, suspects: set[int]) -> Section:
    """At most 12 rows of ranks that are alike; those with ``suspects`` stay if not all fit."""
    alike: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for rank in range(job.ranks):
        last, now, since = _where(job, rank)
        ranks, times = alike.setdefault((last, now), ([], []))
        ranks.append(rank)
        times += [] if since is None else [since]
    rows = sorted(alike.items(), key=lambda row: not suspects.intersection(row[1][0]))
    cells = [("ranks", "host", "last finished", "now", "since")]
    for (last, now), (ranks, times) in sorted(rows[:_MOST_ROWS], key=lambda row: row[1][0][0]):
        hosts = sorted({job.hosts.get(rank, "?") or "?" for rank in ranks})
        host = hosts[0] if len(hosts) == 1 else count(len(hosts), "host")
        cells.append((rank_list(ranks).split(" ", 1)[1], host, last, now, span(times)))
    longest = [max(len(row[column]) for row in cells) for column in range(5)]
    widths = [min(*pair) for pair in zip(longest, _MOST_WIDTHS, strict=False)]
    left = COLUMNS - 2 - sum(widths) - longest[4] - 4
    widths.append(max(min(longest[3], left), 0))
    lines = [
        " ".join([*(f"{cut(c, w):{w}}" for c, w in zip(row, widths, strict=False)), row[4]])
        for row in cells
    ]
    return Section(
        "Where each rank is (since: time in the operation, or since the last call of one):",
        [[f"  {line}"] for line in lines],
        max(len(rows) - _MOST_ROWS, 0),
    )


def _where(job: Job, rank: int) -> tuple[str, str, float | None]:
    """What a rank finished last, where it is now, and for how many seconds."""
    dump = job.dumps.get(rank)
    if dump is None:
        return "-", job.gone.get(rank, "no dump"), None
    done = [op for op in dump.operations if op.state == "done"]
    last = _brief(max(done, key=lambda op: op.id)) if done else "-"
    operation = job.waits_in(rank)
    if operation is not None and (operation.waited_for or not dump.stacks):
        return last, f"in {_brief(operation)}", job.waited(rank, operation)
    return last, job.place(rank).sentence, job.idle(rank)


def _brief(operation: Operation) -> str:
    return f"{operation.operation} #{operation.sequence} '{operation.group}'"


def _waits(job: Job) -> Iterator[str]:
    """For each group that waits: who waits for which ranks, with bytes expected and arrived."""
    for stall in job.stalls:
        missing = missing_bytes(stall)
        name = _brief(stall.operation)
        who = f"{rank_list(stall.waiting)} {verb(stall.waiting, 'waits', 'wait')}"
        for what, ranks in (("not called by", stall.late), ("no dump of", stall.absent)):
            if ranks:
                yield f"{name}: {what} {rank_list(ranks)}; {who}"
        sources = sorted(missing, key=lambda r: (-len(missing[r][0]), -missing[r][3], r))
        for source in sources[:_MOST_SOURCES]:
            by, expected, arrived, since = missing[source]
            yield (
                f"{name}: {rank_list(by)} {verb(by, 'has', 'have')} {size(arrived)} of "
                f"{size(expected)} from rank {source}, nothing for {seconds(since)}"
            )
        if len(sources) > _MOST_SOURCES:
            yield f"{name}: bytes of {count(len(sources) - _MOST_SOURCES, 'more rank')} lack"
        if not missing and not stall.late and not stall.absent:
            yield f"{name}: {who}; all members have called it"


def _links(job: Job) -> list[str]:
    """One row for each link that is not up."""
    down: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, dump in job.dumps.items():
        for key, state in dump.network.items():
            if key.startswith(LINK) and state not in ("up", ""):
                down[dump.host, key, str(state)].append(rank)
    return [
        f"{host}: {link}: {state}, say {rank_list(ranks)}"
        for (host, link, state), ranks in sorted(down.items())
    ]


def _connections(job: Job) -> Iterator[str]:
    """One row for each state that ranks see another one in, the worst first."""
    seen: dict[tuple[int, int, str], dict[int, Connection]] = defaultdict(dict)
    for view in job.groups.values():
        for rank, group in view.seen.items():
            awaited = {peer.rank for peer in group.oldest.awaited} if group.oldest else set()
            for one in group.connections:
                # Not yet answered is news only of a rank that is waited for.
                silent = one.state == "no message yet" and one.rank not in awaited
                if one.state in _TOLD and not silent:
                    seen[_TOLD.index(one.state), one.rank, one.path].setdefault(rank, one)
    for key in sorted(seen):
        by = seen[key]
        first = next(iter(by.values()))
        state = first.state
        if state == "silent":
            state = f"silent for {span([c.silent_seconds for c in by.values()])}"
        text = f"{job.named([first.rank])}: {state}, to {rank_list(by)}"
        last = [t for c in by.values() if (t := c.last_message_seconds) is not None]
        text += f", last message {seconds(min(last))} ago" if last else ""
        text += f", over {first.path}" if first.path else ""
        why = next((c.why for c in by.values() if c.why), "")
        yield f"{text}: {why}" if why else text


def _differences(job: Job) -> Iterator[str]:
    """The first operation that the ranks of a group called unlike, with one line for each side."""
    for view, found in job_differences(job):
        for difference in found:
            number = difference.sequence
            before = f"#{number - 1} is the same on them"
            if not difference.after:
                before = f"whether #{number - 1} is alike the dumps do not show"
            if number == 1:
                before = "it is the first one"
            yield f"group '{view.name}', operation #{number} ({before}):"
            yield from (f"  {row}" for row in difference.rows)


def _program(job: Job, suspects: set[int]) -> Iterator[str]:
    """The user's lines that ranks stand at, those of ``suspects`` first, then of most ranks."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank in job.dumps:
        place = job.place(rank)
        by_place[place.sentence + (f": {place.text}" if place.text else "")].append(rank)

    def order(item: tuple[str, list[int]]) -> tuple[bool, int, int]:
        return not suspects.intersection(item[1]), -len(item[1]), item[1][0]

    for text, ranks in sorted(by_place.items(), key=order):
        yield f"{rank_list(ranks)} {verb(ranks, 'is', 'are')} {text}"
