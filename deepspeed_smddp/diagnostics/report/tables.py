"""The lists of a report: where each rank is, who waits for whom, the lines of the program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from deepspeed_smddp.diagnostics.report.differences import job_differences
from deepspeed_smddp.diagnostics.report.dump import Operation
from deepspeed_smddp.diagnostics.report.job import Job
from deepspeed_smddp.diagnostics.report.lateness import missing_bytes
from deepspeed_smddp.diagnostics.report.wording import (
    count,
    cut,
    rank_list,
    seconds,
    size,
    span,
    verb,
)

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
