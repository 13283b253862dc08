"""``smddp report``: asks running ranks for a report, or makes the page of dumps again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, echo

from deepspeed_smddp.diagnostics import report_files
from deepspeed_smddp.diagnostics.report import dump, fr_trace, page
from deepspeed_smddp.diagnostics.report.dump import DumpError
from deepspeed_smddp.diagnostics.report_files import FR_TRACE, PAGE, Running
from deepspeed_smddp.upstream import compile_locks

# The rank that writes the page waits for ten seconds for the dumps of the others.
_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.1


def report(
    target: Annotated[
        str, Argument(help="A process, a job, or a folder with dumps; none: the job of this host.")
    ] = "",
) -> None:
    """Say why a job hangs: which rank is where, who waits for whom, and what to do.

    Asks a running job (SIGUSR2 to one of its ranks does the same), or reads the dumps in a folder.
    """
    is_folder = target and Path(target).is_dir()
    echo(of_folder(Path(target)) if is_folder else of_job(target), nl=False)


def of_folder(folder: Path) -> str:
    """The page of the dumps ``rank-*.json`` in a folder, as of several hosts put together.

    Writes the same dumps for torch's analyzer into ``fr_trace/``.

    Raises:
        DumpError: there are none.
    """
    dumps, damaged = {}, {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            found = dump.load(path)
            dumps[found.rank] = found
        except DumpError as error:
            rank = int(path.stem.partition("-")[2])
            damaged[rank] = f"rank {rank}: {error}"
    if not dumps:
        raise DumpError(f"{folder} holds no dump (rank-*.json)")
    with contextlib.suppress(OSError):  # the folder may be read-only
        fr_trace.write(dumps, folder / FR_TRACE)
    ranks = max(found.ranks for found in dumps.values())
    return page.page(dumps, damaged, ranks, str(folder))


def of_job(target: str) -> str:
    """The page of a job that runs on this host, by its name or by the number of a process of it.

    Raises:
        DumpError: no such job runs here, or it writes no report.
    """
    file = ask(target) / PAGE
    # Without it another host's rank has written the page: this one is of this host's dumps.
    return file.read_text(encoding="utf-8") if file.is_file() else of_folder(file.parent)


def ask(target: str) -> Path:
    """Makes the ranks of a job write their dumps; the folder of those of this host.

    The page is in it if a rank of this host has written it. Raises as :func:`of_job`.
    """
    asked = _choose(target, list(report_files.running()))
    before = set(asked.folder.glob("report-*"))
    try:
        os.kill(asked.pid, signal.SIGUSR2)
    except OSError as error:
        raise DumpError(f"process {asked.pid} can't be asked: {error.strerror}") from None
    until = time.monotonic() + _PATIENCE_SECONDS
    folder = None
    while time.monotonic() < until:
        folder = next(iter(set(asked.folder.glob("report-*")) - before), folder)
        if folder is not None and (folder / PAGE).is_file():
            break
        time.sleep(_LOOK_SECONDS)
    if folder is None:
        raise DumpError(
            f"process {asked.pid} has made no report within {_PATIENCE_SECONDS:g} s: "
            "its Python does not run (something holds the GIL), or it handles SIGUSR2 itself"
        )
    return folder


def _choose(target: str, running: list[Running]) -> Running:
    found = [p for p in running if target in ("", p.job, str(p.pid))]
    if len({process.folder for process in found}) == 1:
        return min(found, key=lambda process: process.rank)
    if not found and os.sep in target:
        raise DumpError(f"there is no folder {target}")
    if not found and target.isdigit() and (waits := _start_of(int(target))):
        raise DumpError(waits)
    if not running:
        raise DumpError("no job over smddp runs on this host (for this user)")
    firsts = {p.folder: p for p in sorted(running, key=lambda p: -p.rank)}
    jobs = ", ".join(f"{p.job} (process {p.pid})" for _, p in sorted(firsts.items()))
    if found:
        raise DumpError(f"several jobs run here: name one, or a process of it: {jobs}")
    raise DumpError(f"no process or job {target!r} runs here; the jobs are: {jobs}")


def _start_of(pid: int) -> str:
    """What a process that has no group yet may wait for; empty if that is not known."""
    try:
        held = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    has = dict(pair.split("=", 1) for pair in held.split("\0") if "=" in pair)
    cache = has.get("XDG_CACHE_HOME") or f"{has.get('HOME', '')}/.cache"
    builds = Path(has.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")
    waits = [compile_locks.described(str(lock)) for lock in builds.rglob("lock")]
    if "MASTER_ADDR" in has:
        waits.append(
            f"the other ranks, to meet them at {has['MASTER_ADDR']}:{has.get('MASTER_PORT', '?')}"
        )
    if not waits:
        return ""
    return f"process {pid} has no group of smddp yet. It may wait for {'; or '.join(waits)}"
