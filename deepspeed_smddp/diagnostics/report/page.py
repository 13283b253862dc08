"""One page of plain text: why a job hangs, where each rank is, and what to do next."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from deepspeed_smddp.diagnostics.report import LINK, causes, slowness
from deepspeed_smddp.diagnostics.report.causes import missing_bytes
from deepspeed_smddp.diagnostics.report.differences import job_differences
from deepspeed_smddp.diagnostics.report.dump import Connection, Dump, Operation
from deepspeed_smddp.diagnostics.report.job import Cause, Job, Weight
from deepspeed_smddp.diagnostics.report.wording import (
    count,
    cut,
    rank_list,
    seconds,
    size,
    span,
    verb,
)

# The worst first. A rank that has left the group has raised an error, or ended: others say so.
_TOLD = ("ended", "lost", "stopped", "silent", "no message yet")
_Sight = tuple[int, Connection]


def rows(job: Job) -> list[str]:
    """One row for each link that is not up, and for each state that ranks see another one in."""
    return [*_links(job), *_connections(job)]


def _links(job: Job) -> list[str]:
    down: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, dump in job.dumps.items():
        for key, state in dump.network.items():
            if key.startswith(LINK) and state not in ("up", ""):
                down[dump.host, key, str(state)].append(rank)
    return [
        f"{host}: {link}: {state}, say {rank_list(ranks)}"
        for (host, link, state), ranks in sorted(down.items())
    ]


def _connections(job: Job) -> list[str]:
    seen: dict[tuple[int, int, str], list[_Sight]] = defaultdict(list)
    for view in job.groups.values():
        for rank, group in view.seen.items():
            awaited = {peer.rank for peer in group.oldest.awaited} if group.oldest else set()
            for connection in group.connections:
                if connection.state not in _TOLD:
                    continue
                # Not yet answered is news only of a rank that is waited for.
                if connection.state == "no message yet" and connection.rank not in awaited:
                    continue
                key = (_TOLD.index(connection.state), connection.rank, connection.path)
                seen[key].append((rank, connection))
    return [_row(job, seen[key]) for key in sorted(seen)]


def _row(job: Job, sights: list[_Sight]) -> str:
    connection = sights[0][1]
    silent = span([c.silent_seconds for _, c in sights])
    last = [c.last_message_seconds for _, c in sights if c.last_message_seconds is not None]
    state = {"silent": f"silent for {silent}"}.get(connection.state, connection.state)
    text = f"{job.named([connection.rank])}: {state}, to {rank_list({r for r, _ in sights})}"
    if last:
        text += f", last message {seconds(min(last))} ago"
    text += f", over {connection.path}" if connection.path else ""
    why = next((c.why for _, c in sights if c.why), "")
    return f"{text}: {why}" if why else text


MOST_ROWS = 12
_WIDTH = 98
_MOST_WIDTHS = (24, 16, 28)  # of ranks, host and last finished; "now" takes what is left
_MOST_SOURCES = 3
_Cells = tuple[str, str, str, str, str]
_Row = tuple[list[int], str, str, list[float]]


def where(job: Job, suspects: set[int]) -> tuple[str, list[str], int]:
    """The header, at most 12 rows of ranks that are alike, and how many rows are left out.

    Rows with ``suspects`` come first if not all fit.
    """
    rows = _rows(job)
    rows.sort(key=lambda row: row[0][0])
    if len(rows) > MOST_ROWS:
        rows.sort(key=lambda row: not suspects.intersection(row[0]))
        rows[:MOST_ROWS] = sorted(rows[:MOST_ROWS], key=lambda row: row[0][0])
    cells = [("ranks", "host", "last finished", "now", "since")]
    cells += [
        (_short(ranks), _host(job, ranks), last, now, span(times))
        for ranks, last, now, times in rows[:MOST_ROWS]
    ]
    header, *shown = _aligned(cells)
    return header, shown, max(len(rows) - MOST_ROWS, 0)


def _rows(job: Job) -> list[_Row]:
    found: dict[tuple[str, str], _Row] = {}
    for rank in range(job.ranks):
        times: list[float] = []
        if rank in job.dumps:
            last, now, since = _of(job, rank)
            times = [since] if since is not None else []
        else:
            last, now = "-", job.gone.get(rank, "no dump")
        row = found.setdefault((last, now), ([], last, now, []))
        row[0].append(rank)
        row[3].extend(times)
    return list(found.values())


def _of(job: Job, rank: int) -> tuple[str, str, float | None]:
    """What a rank finished last, where it is now, and for how many seconds."""
    done = [op for op in job.dumps[rank].operations if op.state == "done"]
    last = _brief(max(done, key=lambda op: op.id)) if done else "-"
    operation = job.waits_in(rank)
    if operation is not None and (operation.waited_for or not job.dumps[rank].stacks):
        return last, f"in {_brief(operation)}", job.waited(rank, operation)
    return last, job.place(rank).sentence, job.idle(rank)


def _brief(operation: Operation) -> str:
    return f"{operation.operation} #{operation.sequence} '{operation.group}'"


def _short(ranks: list[int]) -> str:
    return rank_list(ranks).split(" ", 1)[1]


def _host(job: Job, ranks: list[int]) -> str:
    names = sorted({job.hosts.get(rank, "?") or "?" for rank in ranks})
    return names[0] if len(names) == 1 else count(len(names), "host")


def _aligned(rows: list[_Cells]) -> list[str]:
    """Rows with columns as wide as they need, within the page."""
    longest = [max(len(row[column]) for row in rows) for column in range(5)]
    widths = [min(*pair) for pair in zip(longest, _MOST_WIDTHS, strict=False)]
    left = _WIDTH - sum(widths) - longest[4] - 4
    widths.append(max(min(longest[3], left), 0))
    return [
        " ".join([*(f"{cut(c, w):{w}}" for c, w in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def waits(job: Job) -> list[str]:
    """For each group that waits: who waits for which ranks, with bytes expected and arrived."""
    rows: list[str] = []
    for stall in job.stalls:
        missing = missing_bytes(stall)
        name = _brief(stall.operation)
        who = rank_list(stall.waiting)
        gist = f"{name}: {who} {verb(stall.waiting, 'waits', 'wait')}"
        for what, ranks in (("not called by", stall.late), ("no dump of", stall.absent)):
            if ranks:
                waiting = verb(stall.waiting, "waits", "wait")
                rows.append(f"{name}: {what} {rank_list(ranks)}; {who} {waiting}")
        sources = sorted(missing, key=lambda r: (-len(missing[r][0]), -missing[r][3], r))
        for source in sources[:_MOST_SOURCES]:
            by, expected, arrived, since = missing[source]
            rows.append(
                f"{name}: {rank_list(by)} {verb(by, 'has', 'have')} {size(arrived)} of "
                f"{size(expected)} from rank {source}, nothing for {seconds(since)}"
            )
        if len(sources) > _MOST_SOURCES:
            rows.append(f"{name}: bytes of {count(len(sources) - _MOST_SOURCES, 'more rank')} lack")
        if not missing and not stall.late and not stall.absent:
            rows.append(f"{gist}; all members have called it")
    return rows


def differences(job: Job) -> list[str]:
    """The first operation that the ranks of a group called unlike, with one line for each side."""
    rows: list[str] = []
    for view, found in job_differences(job):
        for difference in found:
            number = difference.sequence
            before = f"#{number - 1} is the same on them"
            if not difference.after:
                before = f"whether #{number - 1} is alike the dumps do not show"
            if number == 1:
                before = "it is the first one"
            rows.append(f"group '{view.name}', operation #{number} ({before}):")
            rows += [f"  {row}" for row in difference.rows]
    return rows


def program(job: Job, suspects: set[int]) -> list[str]:
    """The user's lines that ranks stand at, those of ``suspects`` first, then of most ranks."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank in job.dumps:
        place = job.place(rank)
        text = f": {place.text}" if place.text else ""
        by_place[place.sentence + text].append(rank)
    order = sorted(
        by_place.items(), key=lambda item: (_apart(item[1], suspects), -len(item[1]), item[1][0])
    )
    return [f"{rank_list(ranks)} {verb(ranks, 'is', 'are')} {text}" for text, ranks in order]


def _apart(ranks: Iterable[int], suspects: set[int]) -> bool:
    return not suspects.intersection(ranks)


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
    found = causes.causes(job, unreached)
    first, others = found[0], found[1:]
    head = [*_headline(job), "", *_wrapped(f"Why: {first.text}.", "     ", _WHY_LINES)]
    sections = [
        _section("Also:", _listed([f"{c.text}." for c in others], _ALSO_LINES), _ALSO),
        _table(job, found),
        _section("Who waits for whom:", _single(waits(job)), 6),
        _section("Connections:", _listed(rows(job), _CONNECTION_LINES), 6),
        _section("First difference between ranks:", _single(differences(job)), 6),
        _section(
            "Before that (in wait(), for a rank to start; rates of single large flows):",
            _single(slowness.rows([slowness.of_dump(d) for d in job.dumps.values()], job.hosts)),
            8,
        ),
        _section("Lines of the program:", _single(program(job, _suspects(found))), 8),
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
    header, rows, rest = where(job, _suspects(found))
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
