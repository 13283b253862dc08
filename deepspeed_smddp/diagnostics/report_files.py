"""Where reports lie, and which processes can be asked for one.

Each start of a job has a folder of its own. ``<folder>/<job>-<start>/running-<rank>.json`` names a
rank that runs; ``<folder>/<job>-<start>/report-<n>/`` holds the dumps of the ranks of this host,
and, where the page was written, ``page.txt`` and ``fr_trace/``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_smddp.process_identity import here, started
from deepspeed_smddp.whole_file import replace

PAGE = "page.txt"
# The same dumps for torch.distributed.flight_recorder.fr_trace.
FR_TRACE = "fr_trace"
# Each is needed only if another rank removes the same folder at the same moment.
_TRIES = 20


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
    """The files of one rank of a job; ``start`` is the same on all ranks of this start of it alone.

    Raises:
        OSError: the folder can't be made, or belongs to another user.
    """

    def __init__(self, job: str, rank: int, start: str) -> None:
        self.job, self.rank = job, rank
        base = root()
        self.folder = base / re.sub(r"[^\w.-]", "_", f"{job}-{start[:8]}")
        self._running = self.folder / f"running-{rank}.json"
        pid = os.getpid()
        note = {"job": job, "rank": rank, "pid": pid, "began": started(pid), "host": here()}
        for attempt in range(_TRIES):
            try:
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
                if base.stat().st_uid != os.getuid():
                    raise PermissionError(f"{base} belongs to another user; set SMDDP_REPORT_DIR")
                self.folder.mkdir(mode=0o700, exist_ok=True)
                replace(self._running, json.dumps(note))
                break
            except (FileNotFoundError, FileExistsError):
                # A rank that ends removes an empty folder. mkdir() calls what was there, and is
                # there no more, a file.
                if attempt == _TRIES - 1:
                    raise
            except OSError as error:  # reports are printed, and go over the store, all the same
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                break

    def report_folder(self, number: int) -> Path:
        """The folder of report ``number`` on this host, made by the first rank that asks for it."""
        folder = self.folder / f"report-{number}"
        with contextlib.suppress(OSError):  # a full disk: writing into it will fail, and say so
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
    """The ranks of this host and user that can be asked.

    Notes of processes that are gone are removed. Another process may have their number.
    """
    for path in sorted(root().glob("*/running-*.json")):
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            if path.stat().st_uid != os.getuid() or note["host"] != here():
                continue
            if note["began"] == started(note["pid"]):
                yield Running(note["job"], note["rank"], note["pid"], path.parent)
            else:
                path.unlink(missing_ok=True)
                path.parent.rmdir()
        except (OSError, ValueError, KeyError):
            continue
