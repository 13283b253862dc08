"""Writes the counters in intervals and when the process ends, as the settings ask.

A thread serves the intervals. It is a daemon, so that it keeps no process alive, and ends before
the last write. Only the process that made the settings apply writes: a forked child has no
reporter. Nor does a process write that never made a default group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from deepspeed_smddp.config.sections import Ledger
from deepspeed_smddp.config.settings import Settings
from deepspeed_smddp.diagnostics.counters import prometheus, sinks, snapshot
from deepspeed_smddp.diagnostics.counters.snapshot import Snapshot
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import logger

_JOIN_SECONDS = 5.0  # a write to a file system that hangs does not hold up the end for longer


class Reporter:
    """The writes that one ``ledger`` section asks for."""

    def __init__(self, wanted: Ledger) -> None:
        self.wanted = wanted
        self._warned: set[Path] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if wanted.interval_seconds and (wanted.json_lines or wanted.prometheus_file):
            self._thread = threading.Thread(target=self._run, name="smddp-ledger", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Ends the thread; False if it is stuck in a write."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def write(self, last: bool) -> None:
        """Writes what is due now; ``last``: also what is due when the process ends."""
        rank = backend.default_rank()
        if rank is None:
            return
        wanted, taken = self.wanted, snapshot.take(rank)
        self._file(wanted.json_lines, taken, lambda path: sinks.append(path, taken.as_json()))
        self._file(
            wanted.prometheus_file,
            taken,
            lambda path: sinks.replace(path, prometheus.text(taken)),
        )
        if not last:
            return
        self._file(wanted.json_file, taken, lambda path: sinks.replace(path, taken.as_json(2)))
        if wanted.table and rank == 0:
            _print(taken)

    def _file(self, name: str, taken: Snapshot, write: Callable[[Path], None]) -> None:
        if not sinks.writes(name, taken.rank):
            return
        path = sinks.path_of(name, taken.rank, taken.host)
        try:
            write(path)
        except OSError as error:
            if path not in self._warned:
                logger.warning(
                    "smddp: the counters can't be written to %s: %s", path, error.strerror or error
                )
            self._warned.add(path)

    def _run(self) -> None:
        while not self._stopped.wait(self.wanted.interval_seconds):
            try:
                self.write(last=False)
            except Exception as error:  # training goes on
                logger.warning("smddp: no counters are written any more: %s", error)
                return


_reporter: Reporter | None = None
_at_exit = False


def follow(settings: Settings) -> None:
    """Starts, replaces or ends the reporter; the settings call it when they apply."""
    global _reporter, _at_exit
    wanted = settings.section.ledger
    if _reporter is not None:
        if _reporter.wanted == wanted:
            return
        _reporter.stop()
        _reporter = None
    if wanted.table or wanted.json_file or wanted.json_lines or wanted.prometheus_file:
        _reporter = Reporter(wanted)
        if not _at_exit:
            _at_exit = True
            atexit.register(finish)
            os.register_at_fork(after_in_child=_forget)


def finish() -> None:
    """The last write of the process."""
    global _reporter
    reporter, _reporter = _reporter, None
    if reporter is not None and reporter.stop():
        reporter.write(last=True)


def _forget() -> None:
    global _reporter
    _reporter = None


def _print(taken: Snapshot) -> None:
    from rich.console import Console

    from deepspeed_smddp.diagnostics.counters import counter_table

    counter_table.show(taken, Console(file=sys.stderr))
