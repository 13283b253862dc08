"""Where reports lie, and which processes can be asked for one.

``<folder>/<job>/running-<pid>.json`` names a rank of this host that runs;
``<folder>/<job>/report-<n>-<time>/`` holds the dumps of the ranks of this host, and, where the page
was written, ``page.txt`` and ``fr_trace/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_smddp.whole_file import replace

PAGE = "page.txt"
# The same dumps for torch.distributed.flight_recorder.fr_trace.
FR_TRACE = "fr_trace"


@dataclass(frozen=True)
class Running:
    """A process of this host that takes part in a job."""

    job: str
    rank: int
    pid: int
    folder: Path


def root() -> Path:
    """The folder of all reports: ``SMDDP_REPORT_DIR``, or one among temporary files."""
    given = os.environ.get("SMDDP_REPORT_DIR", "")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"smddp-reports-{os.getuid()}"


def job_name() -> str:
    """The launcher's name of this job, or the address of its rendezvous."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    address = os.environ.get("MASTER_ADDR", "job"), os.environ.get("MASTER_PORT", "")
    return run if run not in ("", "none") else "-".join(part for part in address if part)


class JobFiles:
    """The files of one rank of a job.

    Raises:
        OSError: the folder can't be made, or belongs to another user.
    """

    def __init__(self, job: str, rank: int) -> None:
        self.job, self.rank = job, rank
        base = root()
        self.folder = base / re.sub(r"[^\w.-]", "_", job)
        self._running = self.folder / f"running-{os.getpid()}.json"
        note = json.dumps({"job": job, "rank": rank, "pid": os.getpid()})
        for last_try in (False, False, True):
            try:
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
                if base.stat().st_uid != os.getuid():
                    raise PermissionError(f"{base} belongs to another user; set SMDDP_REPORT_DIR")
                self.folder.mkdir(mode=0o700, exist_ok=True)
                replace(self._running, note)
                break
            except FileNotFoundError:  # a rank that ends has removed the empty folder meanwhile
                if last_try:
                    raise

    def report_folder(self, number: int) -> Path:
        """The folder of report ``number`` on this host, made by the first rank that asks for it."""
        existing = sorted(self.folder.glob(f"report-{number}-*"))
        recent = [path for path in existing if time.time() - path.stat().st_mtime < 60]
        if recent:
            return recent[-1]
        folder = self.folder / f"report-{number}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def write_dump(self, number: int, dump: dict[str, Any]) -> None:
        """Writes the whole dump of this rank."""
        replace(self.report_folder(number) / f"rank-{self.rank}.json", json.dumps(dump))

    def dumps(self, number: int) -> dict[int, dict[str, Any]]:
        """The dumps that ranks of this host have written for a report."""
        paths = self.report_folder(number).glob("rank-*.json")
        dumps = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return {dump["rank"]: dump for dump in dumps}

    def close(self) -> None:
        """The process ends. Removes what holds no report."""
        self._running.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()
            self.folder.parent.rmdir()


def running() -> Iterator[Running]:
    """The ranks of this host that can be asked; notes of processes that are gone are removed."""
    for path in sorted(root().glob("*/running-*.json")):
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            os.kill(note["pid"], 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError):
            continue
        else:
            yield Running(note["job"], note["rank"], note["pid"], path.parent)
