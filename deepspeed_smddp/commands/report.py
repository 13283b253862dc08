"""``smddp report``: asks running ranks for a report, or makes the page of dumps again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed_smddp.diagnostics import report_files
from deepspeed_smddp.diagnostics.report import dump, fr_trace, page
from deepspeed_smddp.diagnostics.report_files import FR_TRACE, PAGE, Running

# The rank that writes the page waits for ten seconds for the dumps of the others.
_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.1


class ReportError(Exception):
    """There is nothing to report on; one sentence says why."""


def of_folder(folder: Path) -> str:
    """The page of the dumps ``rank-*.json`` in a folder, as of several hosts put together.

    Writes the same dumps for torch's analyzer into ``fr_trace/``.

    Raises:
        ReportError: there are none.
    """
    dumps, damaged = {}, {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            found = dump.load(path)
            dumps[found.rank] = found
        except dump.DumpError as error:
            rank = int(path.stem.partition("-")[2])
            damaged[rank] = f"rank {rank}: {error}"
    if not dumps:
        raise ReportError(f"{folder} holds no dump (rank-*.json)")
    with contextlib.suppress(OSError):  # the folder may be read-only
        fr_trace.write(dumps, folder / FR_TRACE)
    ranks = max(found.ranks for found in dumps.values())
    return page.page(dumps, damaged, ranks, str(folder))


def of_job(target: str) -> str:
    """The page of a job that runs on this host, by its name or by the number of a process of it.

    Raises:
        ReportError: no such job runs here, or it writes no report.
    """
    folder = ask(target)
    if (folder / PAGE).is_file():
        return (folder / PAGE).read_text(encoding="utf-8")
    # Another host's rank has written the page: this one is of this host's dumps.
    return of_folder(folder)


def ask(target: str) -> Path:
    """Makes the ranks of a job write their dumps; the folder of those of this host.

    The page is in it if a rank of this host has written it.

    Raises:
        ReportError: as :func:`of_job`.
    """
    asked = _choose(target, list(report_files.running()))
    before = set(asked.folder.glob("report-*"))
    try:
        os.kill(asked.pid, signal.SIGUSR2)
    except OSError as error:
        raise ReportError(f"process {asked.pid} can't be asked: {error.strerror}") from None
    until = time.monotonic() + _PATIENCE_SECONDS
    folder = None
    while time.monotonic() < until:
        folder = next(iter(set(asked.folder.glob("report-*")) - before), folder)
        if folder is not None and (folder / PAGE).is_file():
            break
        time.sleep(_LOOK_SECONDS)
    if folder is None:
        raise ReportError(
            f"process {asked.pid} has made no report within {_PATIENCE_SECONDS:g} s: "
            "its Python does not run (something holds the GIL), or it handles SIGUSR2 itself"
        )
    return folder


def _choose(target: str, running: list[Running]) -> Running:
    found = list(_matching(target, running))
    if found:
        return min(found, key=lambda process: process.rank)
    if not running:
        raise ReportError("no job over smddp runs on this host (for this user)")
    jobs = sorted({process.job for process in running})
    raise ReportError(f"no process or job {target!r} runs here; the jobs are: {', '.join(jobs)}")


def _matching(target: str, running: list[Running]) -> Iterator[Running]:
    jobs = {process.job for process in running}
    for process in running:
        if target in (process.job, str(process.pid)) or (not target and len(jobs) == 1):
            yield process
