"""Makes a report when an operation fails, at SIGUSR2, or when another rank makes one.

One thread of each rank waits for errors. It collects what this rank knows, gives it to the other
ranks over the store, and one of them prints a page that says why the job hangs. Errors are held
back meanwhile, as they may end the process before the page is written.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import islice
from types import FrameType
from typing import Any

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import monitoring
from deepspeed_smddp.diagnostics.doctor import machine
from deepspeed_smddp.diagnostics.rank_ports import Clock, ClockServer, Listener, ask, measure
from deepspeed_smddp.diagnostics.report import DUMP_SECONDS, IN_ORDER, LINK
from deepspeed_smddp.diagnostics.report_exchange import CLOCK, ReportStore, introduce, withdraw
from deepspeed_smddp.diagnostics.report_files import FR_TRACE, PAGE, JobFiles, job_name
from deepspeed_smddp.distributed import backend, extension, labels
from deepspeed_smddp.errors import logger
from deepspeed_smddp.whole_file import replace

VERSION = 1
# What follows the name of a group in records of operations that it hands to another backend.
FORWARDED = " (forwarded)"
# The same for operations on tensors of a GPU.
ON_DEVICE = " (device)"
_CALL = torch.nn.Module._call_impl.__code__
_MOST_FRAMES = 60
# How long connecting to the other ranks may take.
_ASK_SECONDS = 2.0
# An error so soon after a report belongs to it: errors of one cause reach the ranks one by one.
_SAME_CAUSE_SECONDS = 10.0
# A rank that would write the page in place of rank 0 gives it so much time.
_PATIENCE_SECONDS = 1.0
# Operations of a dump that goes over the store; the file holds all.
_SENT_OPERATIONS = 300
# How a request by a signal begins.
_SIGNAL = "signal "
_LOST = re.compile(r"rank (\d+) \([^)]*\)(?: \(process \d+\))? (?:is lost|(?:has )?ended)")


def collect(
    job: str, rank: int, ranks: int, reason: str, error: str, clock: Clock | None
) -> dict[str, Any]:
    """The dump of this process, as ``report.dump.Dump`` describes it."""
    states = backend.states(with_connections=True)
    operations: list[dict[str, Any]] = []
    for row in extension.core.flight_record():
        label, parameters = labels.split(row["label"])
        operations.append({**row, "label": label, "parameters": parameters})
    for group in list(states):
        over = f"of group '{group['name']}' over "
        states.append(_beside(group, FORWARDED, operations, error if over in error else ""))
        on_device = _beside(group, ON_DEVICE, operations, "")
        if on_device["submitted"]:
            failed = (r["state"] for r in operations if r["group"] == on_device["name"])
            states.append({**on_device, "error": error if "failed" in failed else ""})
    return {
        "version": VERSION,
        "job": job,
        "rank": rank,
        "ranks": ranks,
        "host": next((group["hosts"][group["rank"]] for group in states), socket.gethostname()),
        "pid": os.getpid(),
        "time": time.time(),
        "reason": reason,
        "error": next((group["error"] for group in states if group["error"]), error),
        "operations": operations,
        "groups": states,
        "stacks": stacks(),
        "network": _network(states),
        "clock": clock and vars(clock),
        "steps": monitoring.step_ends(),
    }


def _shortened(dump: dict[str, Any]) -> dict[str, Any]:
    """What a page is made of: the last operations, and connections that are not in order."""
    last = dump["operations"][-_SENT_OPERATIONS:]
    groups = [
        {**group, "connections": [c for c in group["connections"] if c["state"] not in IN_ORDER]}
        for group in dump["groups"]
    ]
    return {**dump, "operations": [{**row, "parameters": []} for row in last], "groups": groups}


def _beside(
    group: dict[str, Any], suffix: str, operations: list[dict[str, Any]], error: str
) -> dict[str, Any]:
    """The operations of a group that are recorded under another name, as a group of their own."""
    name = group["name"] + suffix
    numbers = [row["sequence"] for row in operations if row["group"] == name]
    return {
        **group,
        "name": name,
        "submitted": max(numbers, default=0),
        "finished": 0,
        "oldest": None,
        "peers": [],
        "connections": [],
        "error": error,
    }


def stacks() -> list[dict[str, Any]]:
    """The Python stack of each thread but the calling one, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        {
            "thread": names.get(ident, f"thread {ident}"),
            "main": ident == threading.main_thread().ident,
            "frames": _frames(frame),
        }
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return sorted(found, key=lambda stack: not stack["main"])


def _frames(innermost: FrameType) -> list[dict[str, Any]]:
    return [
        {
            "file": frame.f_code.co_filename,
            "line": line or frame.f_code.co_firstlineno,
            "function": frame.f_code.co_name,
            "text": linecache.getline(frame.f_code.co_filename, line or 0).strip(),
            # The class of the model's module whose hooks and forward a frame of torch calls.
            "owner": type(frame.f_locals.get("self")).__name__ if frame.f_code is _CALL else "",
        }
        for frame, line in [*islice(traceback.walk_stack(innermost), _MOST_FRAMES)][::-1]
    ]


def _network(states: list[dict[str, Any]]) -> dict[str, str | float]:
    refused = [row["calls"] for row in backend.statistics() if row["collective"] == "refused"]
    found: dict[str, str | float] = {"refused messages": float(sum(refused))}
    for name in ("FABRIC_PROVIDER", "FABRIC_INTERFACE"):
        if value := os.environ.get(f"SMDDP_{name}", ""):
            found[name] = value
    paths = {c["path"] for group in states for c in group["connections"]}
    nics = {nic for path in paths for nic in machine.nics_of(path)}
    return found | {f"{LINK}{nic}": machine.link_state(nic) for nic in sorted(nics)}


class Reporter(threading.Thread):
    """The thread of one rank. It ends with :meth:`stop`, or with the process.

    Raises:
        OSError: there is no folder for reports, or no port to listen at.
    """

    def __init__(self, store: Any, rank: int, ranks: int, name: str) -> None:
        super().__init__(name="smddp-report", daemon=True)
        self._store, self._rank, self._ranks = store, rank, ranks
        self._others = [other for other in range(ranks) if other != rank]
        self._listener = Listener(os.environ.get("MASTER_ADDR", "localhost"))
        self._files = JobFiles(job_name(), rank, name)
        introduce(store, rank, self._listener.contact())
        self._clock: ClockServer | None = None
        if rank == 0 and ranks > 1:
            self._clock = ClockServer(os.environ.get("MASTER_ADDR", "localhost"))
            self._clock.start()
            introduce(store, CLOCK, self._clock.contact())
        self._number = 0
        self._ended = threading.Event()
        self._latest = -_SAME_CAUSE_SECONDS

    def run(self) -> None:
        """Waits for errors and requests, and reports them."""
        try:
            self._watch()
        finally:  # however the thread ends, it holds no error back
            extension.core.reported()
            if not self._ended.is_set():
                extension.core.hold_errors(timedelta(0))
            withdraw(self._store, self._rank)
            if self._clock is not None:
                withdraw(self._store, CLOCK)

    def _watch(self) -> None:
        wanted = select.poll()  # select() has no descriptors beyond 1,023
        wanted.register(extension.core.error_notification(), select.POLLIN)
        wanted.register(self._listener.socket, select.POLLIN)
        while not self._ended.is_set():  # a report that ends now has taken what stop() asked for
            wanted.poll()
            why = extension.core.take_error()
            asked = self._listener.was_asked()
            if self._ended.is_set():
                return
            is_news = time.monotonic() > self._latest + _SAME_CAUSE_SECONDS
            if asked or (why and (is_news or why.startswith(_SIGNAL))):
                self._report(why)
            extension.core.reported()

    def stop(self) -> None:
        """Ends the thread, in at most the time of one request to the store."""
        self._ended.set()
        extension.core.hold_errors(timedelta(0))
        extension.core.ask_for_report("the process ends")
        if self is not threading.current_thread():
            self.join(timeout=3)
        self._listener.socket.close()
        if self._clock is not None:
            self._clock.close()
        self._files.close()

    def _report(self, why: str) -> None:
        try:
            if not self._exchange(why, ReportStore(self._store)):
                return
        except Exception as error:  # a report must not end the job
            logger.warning("smddp: the report failed: %s: %s", type(error).__name__, error)
        self._number += 1
        self._latest = time.monotonic()
        extension.core.take_error()  # what came meanwhile is in it

    def _exchange(self, why: str, store: ReportStore) -> bool:
        """Makes a report, or takes part in the one that has begun. False if there is none."""
        while store.exists(f"{self._number + 1}/reason"):
            self._number += 1
        if not why and not store.exists(f"{self._number}/reason"):
            return False  # asked for a report that this rank has taken part in
        if why and store.exists(f"{self._number}/done"):
            self._number += 1
        number = self._number
        mine = f"{secrets.token_hex(8)} rank {self._rank}: {why or 'another rank asked'}"
        first = store.claim(f"{number}/reason", mine)
        reason = (first or mine).partition(" ")[2]
        error = "" if why.startswith(_SIGNAL) else why
        clock = self._ask_clock(store)
        dump = collect(self._files.job, self._rank, self._ranks, why or reason, error, clock)
        self._write(lambda: self._files.write_dump(number, dump))
        store.publish(number, self._rank, _shortened(dump))
        if first == mine:
            ended = ask(store.contacts(self._others), _ASK_SECONDS)
            store.put(f"{number}/ended", json.dumps(sorted(ended)))
        store.wait(f"{number}/leader", 0.0 if self._rank == 0 else _PATIENCE_SECONDS)
        leader = store.claim(f"{number}/leader", str(self._rank))
        if leader == str(self._rank):
            self._lead(store, dump, reason)
            store.put(f"{number}/done", "1")
            store.discard(number, [*self._others, self._rank])
        elif not leader:
            self._report_without_store(dump, why)
        elif why:
            store.wait(f"{number}/done", DUMP_SECONDS)
        return True

    def _ask_clock(self, store: ReportStore) -> Clock | None:
        """How far this host's clock is ahead of rank 0's. One rank of each host asks."""
        for group in backend.states():
            hosts = dict(zip(group["members"], group["hosts"], strict=False))
            own = [rank for rank, host in hosts.items() if host == hosts.get(self._rank)]
            if own and min(own) < self._rank:
                return None
        contact = store.get(f"contact/{CLOCK}") if self._rank != 0 else b""
        return measure(contact.decode()) if contact else None

    def _lead(self, store: ReportStore, own: dict[str, Any], reason: str) -> None:
        gone = _lost_ranks(own["error"], reason)

        def enough(missing: set[int]) -> bool:
            for rank in json.loads(store.get(f"{self._number}/ended") or b"[]"):
                gone.setdefault(rank, f"rank {rank} is gone: its process has ended")
            return missing <= gone.keys()

        dumps = store.gather(self._number, self._others, DUMP_SECONDS, enough)
        dumps[self._rank] = own
        self._print(dumps, _lost_ranks(*(dump["error"] for dump in dumps.values())) | gone)

    def _report_without_store(self, own: dict[str, Any], why: str) -> None:
        """The store has ended, often with rank 0: one rank makes a page of its host's dumps."""
        gone = _lost_ranks(own["error"], why)
        if self._rank != min(rank for rank in range(self._ranks) if rank not in gone):
            return
        time.sleep(_PATIENCE_SECONDS)  # the other ranks of this host write their dumps meanwhile
        self._print(
            self._files.dumps(self._number) | {self._rank: own},
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
        gone = {rank: why for rank, why in gone.items() if rank not in dumps}
        text = page(read, gone, self._ranks, str(folder), unreached)
        print(text, file=sys.__stderr__, flush=True)
        self._write(lambda: replace(folder / PAGE, text))
        self._write(lambda: fr_trace.write(read, folder / FR_TRACE))

    def _write(self, write: Callable[[], object]) -> None:
        """A full disk keeps neither the page from being printed, nor other ranks waiting."""
        try:
            write()
        except OSError as error:
            logger.warning("smddp: a file of the report could not be written: %s", error)


def _lost_ranks(*errors: str) -> dict[int, str]:
    """The ranks that errors call lost, each with the first error that does."""
    found: dict[int, str] = {}
    for error in errors:
        for match in _LOST.finditer(error):
            found.setdefault(int(match[1]), error)
    return found


def start(ends: ExitStack, store: Any, rank: int, ranks: int, name: str) -> None:
    """A default group is made: its rank ``rank`` reports from now on, or not at all.

    ``name`` is that of this making of the group, the same on all its ranks. ``SMDDP_REPORT=0`` in
    the environment means not at all. ``ends`` gets what ends it.
    """
    if not settings.current().process.report:
        return
    try:
        reporter = Reporter(store, rank, ranks, name)
    except (OSError, RuntimeError, AttributeError) as error:
        logger.warning("smddp: there will be no report if the job hangs: %s", error)
        return
    extension.core.report_at_signal(signal.SIGUSR2)
    extension.core.hold_errors(timedelta(seconds=2 * DUMP_SECONDS))
    reporter.start()
    ends.callback(reporter.stop)
