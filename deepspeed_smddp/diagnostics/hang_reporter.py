"""Makes a report when an operation fails, at SIGUSR2, or when another rank makes one.

One thread of each rank waits for trouble. It collects what this rank knows, gives it to the other
ranks over the store, and one of them prints a page that says why the job hangs. Errors are held
back meanwhile, as they may end the process before the page is written.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from deepspeed_smddp.diagnostics import clock_exchange, flight_dump
from deepspeed_smddp.diagnostics.report.dump_terms import DUMP_SECONDS
from deepspeed_smddp.diagnostics.report_files import FR_TRACE, JobFiles, job_name
from deepspeed_smddp.diagnostics.report_listener import Listener, ask
from deepspeed_smddp.diagnostics.report_store import ReportStore, introduce, introduce_clock
from deepspeed_smddp.distributed import backend
from deepspeed_smddp.errors import logger

# How long connecting to the other ranks may take.
_ASK_SECONDS = 2.0
# Trouble so soon after a report belongs to it: errors of one cause reach the ranks one by one.
_SAME_CAUSE_SECONDS = 10.0
# A rank that would write the page in place of rank 0 gives it so much time.
_PATIENCE_SECONDS = 1.0
# Operations of a dump that goes over the store; the file holds all.
_SENT_OPERATIONS = 300

# How a request by a signal begins.
_SIGNAL = "signal "

_LOST = re.compile(r"rank (\d+) \([^)]*\)(?: \(process \d+\))? (?:is lost|ended)")


class Reporter(threading.Thread):
    """The thread of one rank. It ends with :meth:`stop`, or with the process.

    Raises:
        OSError: there is no folder for reports, or no port to listen at.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        super().__init__(name="smddp-report", daemon=True)
        self._store, self._rank, self._ranks = store, rank, ranks
        self._listener = Listener(os.environ.get("MASTER_ADDR", "localhost"))
        self._files = JobFiles(job_name(), rank)
        introduce(store, rank, self._listener.contact())
        self._clock: clock_exchange.ClockServer | None = None
        if rank == 0 and ranks > 1:
            self._clock = clock_exchange.ClockServer(os.environ.get("MASTER_ADDR", "localhost"))
            self._clock.start()
            introduce_clock(store, self._clock.contact())
        self._number = 0
        self._ended = threading.Event()
        self._latest = -_SAME_CAUSE_SECONDS

    def run(self) -> None:
        """Waits for trouble, and reports it."""
        from deepspeed_smddp import _C

        bell = _C.trouble_bell()
        while not self._ended.is_set():
            select.select([bell, self._listener.fileno()], [], [])
            why = _C.take_trouble()
            asked = self._listener.was_asked()
            if self._ended.is_set():
                return
            is_news = time.monotonic() > self._latest + _SAME_CAUSE_SECONDS
            if asked or (why and (is_news or why.startswith(_SIGNAL))):
                self._report(why)
            _C.reported()

    def stop(self) -> None:
        """Ends the thread, in at most the time of one request to the store."""
        from deepspeed_smddp import _C

        self._ended.set()
        _C.hold_errors(timedelta(0))
        _C.ask_for_report("the process ends")
        if self is not threading.current_thread():
            self.join(timeout=3)
        self._listener.close()
        if self._clock is not None:
            self._clock.close()
        self._files.close()

    def _report(self, why: str) -> None:
        from deepspeed_smddp import _C

        try:
            if not self._exchange(why, ReportStore(self._store)):
                return
        except Exception as error:  # a report must not end the job
            logger.warning("smddp: the report failed: %s: %s", type(error).__name__, error)
        self._number += 1
        self._latest = time.monotonic()
        _C.take_trouble()  # what came meanwhile is in it

    def _exchange(self, why: str, store: ReportStore) -> bool:
        """Makes a report, or takes part in the one that has begun. False if there is none."""
        self._number = store.latest(self._number)
        if not why and not store.has_begun(self._number):
            return False  # asked for a report that this rank has taken part in
        if why and store.has_ended(self._number):
            self._number += 1
        number = self._number
        reason, first = store.begin(number, f"rank {self._rank}: {why or 'another rank asked'}")
        error = "" if why.startswith(_SIGNAL) else why
        dump = flight_dump.collect(
            self._files.job, self._rank, self._ranks, why or reason, error, self._ask_clock(store)
        )
        self._files.write_dump(number, dump)
        short = flight_dump.shortened(dump, _SENT_OPERATIONS)
        store.publish(number, self._rank, short)
        if first:
            store.note_ended(number, ask(store.contacts(self._others()), _ASK_SECONDS))
        leads = store.leads(number, self._rank, 0.0 if self._rank == 0 else _PATIENCE_SECONDS)
        if leads:
            self._lead(store, short, reason)
            store.finish(number)
        elif leads is None:
            self._report_without_store(short, why)
        elif why:
            store.await_finish(number, DUMP_SECONDS)
        return True

    def _ask_clock(self, store: ReportStore) -> dict[str, Any] | None:
        """How far this host's clock is ahead of rank 0's. One rank of each host asks."""
        for group in backend.states():
            hosts = dict(zip(group["members"], group["hosts"], strict=False))
            own = [rank for rank, host in hosts.items() if host == hosts.get(self._rank)]
            if own and min(own) < self._rank:
                return None
        contact = store.clock() if self._rank != 0 else ""
        return clock_exchange.measure(contact) if contact else None

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def _lead(self, store: ReportStore, own: dict[str, Any], reason: str) -> None:
        gone = lost_ranks([own["error"], reason])

        def enough(missing: set[int]) -> bool:
            for rank in store.ended(self._number):
                gone.setdefault(rank, f"rank {rank} is gone: its process has ended")
            return missing <= gone.keys()

        dumps = store.gather(self._number, self._others(), DUMP_SECONDS, enough)
        dumps[self._rank] = own
        gone = {**lost_ranks([dump["error"] for dump in dumps.values()]), **gone}
        self._print(dumps, gone)

    def _report_without_store(self, own: dict[str, Any], why: str) -> None:
        """The store has ended, often with rank 0: one rank makes a page of its host's dumps."""
        gone = lost_ranks([own["error"], why])
        if self._rank != min(rank for rank in range(self._ranks) if rank not in gone):
            return
        time.sleep(_PATIENCE_SECONDS)  # the other ranks of this host write their dumps meanwhile
        dumps = {**self._files.dumps(self._number), self._rank: own}
        self._print(
            dumps,
            gone,
            "could not be asked: the store of the job has ended. `smddp report FOLDER` makes the "
            "whole page once the dumps of all hosts lie in one folder",
        )

    def _print(
        self, dumps: dict[int, dict[str, Any]], gone: dict[int, str], unreached: str = ""
    ) -> None:
        from deepspeed_smddp.diagnostics.report import fr_trace
        from deepspeed_smddp.diagnostics.report.dump import Dump
        from deepspeed_smddp.diagnostics.report.page import page

        read = {rank: Dump.model_validate(dump) for rank, dump in dumps.items()}
        folder = self._files.report_folder(self._number)
        text = page(
            read,
            {rank: why for rank, why in gone.items() if rank not in dumps},
            self._ranks,
            str(folder),
            unreached,
        )
        self._files.write_page(self._number, text)
        print(text, file=sys.__stderr__, flush=True)
        fr_trace.write(read, folder / FR_TRACE)


def lost_ranks(errors: list[str]) -> dict[int, str]:
    """The ranks that errors call lost, each with the first error that does."""
    found: dict[int, str] = {}
    for error in errors:
        for match in _LOST.finditer(error):
            found.setdefault(int(match[1]), error)
    return found


_reporter: Reporter | None = None


def start(store: Any, rank: int, ranks: int) -> None:
    """A default group is made: its rank ``rank`` reports from now on, or not at all.

    ``SMDDP_REPORT=0`` in the environment means not at all.
    """
    from deepspeed_smddp import _C

    global _reporter
    stop()
    if os.environ.get("SMDDP_REPORT") == "0":
        return
    try:
        _reporter = Reporter(store, rank, ranks)
    except (OSError, RuntimeError, AttributeError) as error:
        logger.warning("smddp: there will be no report if the job hangs: %s", error)
        return
    _C.report_at_signal(signal.SIGUSR2)
    _C.hold_errors(timedelta(seconds=2 * DUMP_SECONDS))
    _reporter.start()
    atexit.register(stop)


def stop() -> None:
    """The process, or its default group, ends."""
    global _reporter
    if _reporter is not None:
        _reporter.stop()
        _reporter = None
    atexit.unregister(stop)
