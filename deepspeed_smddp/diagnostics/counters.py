"""The counters of the collectives, written to where people look: a table, files, Prometheus.

They are written in intervals, by a thread, and when the process ends, as the ``ledger`` section
asks. Only the process that made the settings apply writes: a forked child has no writer, nor has a
process that never made a default group.

https://prometheus.io/docs/instrumenting/exposition_formats/ has the format that node exporter's
textfile collector reads. Times are left out: it refuses files with timestamps.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_smddp.config.schema import Ledger
from deepspeed_smddp.config.settings import Settings
from deepspeed_smddp.distributed import backend, extension, launchers, memory
from deepspeed_smddp.errors import logger
from deepspeed_smddp.whole_file import replace

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1  # of the object in JSON
_REFUSED = "refused"  # the row that counts dropped messages; it is no collective
_RANK, _HOST = "{rank}", "{host}"  # in names of files
_JOIN_SECONDS = 5.0  # a write to a file system that hangs does not hold up the end for longer
# The key of a row -> the metric's name and help.
_OF_ROWS = (
    ("calls", "smddp_calls_total", "Collective operations of this rank."),
    ("bytes", "smddp_bytes_total", "Bytes of all ranks' blocks: outputs gathered, inputs reduced."),
    ("sent_bytes", "smddp_sent_bytes_total", "Bytes that this rank has sent to other hosts."),
    ("sent_raw_bytes", "smddp_sent_raw_bytes_total", "What they stand for: coded, fewer travel."),
    ("seconds", "smddp_seconds_total", "Seconds from the calls to their completion, summed."),
    ("wait_seconds", "smddp_wait_seconds_total", "Seconds that callers spent in wait()."),
)
_STATES = ("in_use", "peak", "reserved", "kept", "huge")  # of shared memory, in bytes


@dataclass(frozen=True)
class Snapshot:
    """What :func:`deepspeed_smddp.statistics` returns, with the time, the rank and the memory.

    ``time`` is in seconds since the epoch.
    """

    time: float
    rank: int
    host: str
    rows: list[extension.core.StatisticsRow]
    memory: extension.core.MemoryStatistics
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def collectives(self) -> list[extension.core.StatisticsRow]:
        """The rows of collectives: smddp's own first, then those that Gloo or NCCL carried out."""
        rows = [row for row in self.rows if row["collective"] != _REFUSED]
        return sorted(rows, key=lambda r: (_is_fallback(r), r["collective"], r["path"]))

    @property
    def refused(self) -> int:
        """Messages from outside the job that this rank dropped."""
        return sum(row["calls"] for row in self.rows if row["collective"] == _REFUSED)

    def as_json(self, indent: int | None = None) -> str:
        """An object and a newline; without ``indent``, one line.

        Seconds are floats, sizes are bytes; counters run since the last reset.
        """
        found = {
            "version": VERSION,
            "time": round(self.time, 3),
            "rank": self.rank,
            "host": self.host,
            "refused_messages": self.refused,
            "rows": self.collectives,
            "peers": self.peers,
            "memory": self.memory,
        }
        return json.dumps(found, indent=indent) + "\n"

    def show(self, console: Console) -> None:
        """Prints a table; what Gloo or NCCL carried out is yellow, and has no times.

        ``sent``: to other hosts, where there are any; fewer bytes than they stand for if coded.
        """
        from rich import filesize
        from rich.table import Table

        table = Table(title=f"smddp: collectives of rank {self.rank}", title_justify="left")
        sends = any(row["sent_raw_bytes"] for row in self.collectives)
        columns = ["collective", "path", "calls", "bytes", *["sent"] * sends, "time", "wait time"]
        for column in columns:
            table.add_column(
                column, justify="left" if column in ("collective", "path") else "right"
            )
        for row in self.collectives:
            foreign = _is_fallback(row)
            times = [row["seconds"], row["wait_seconds"]]
            table.add_row(
                row["collective"],
                row["path"],
                f"{row['calls']:,}",
                filesize.decimal(row["bytes"]),
                *[_sent(row)] * sends,
                *("-" if foreign else f"{seconds:.3f} s" for seconds in times),
                style="yellow" if foreign else None,
            )
        console.print(table)
        if self.refused:
            console.print(f"{self.refused:,} messages from outside the job were refused.")

    def as_prometheus(self) -> str:
        """The whole file. Several ranks' files in one folder agree on types and help texts."""
        rank = {"rank": str(self.rank)}
        held: Mapping[str, Any] = self.memory
        text = ""
        for key, name, meaning in _OF_ROWS:
            rows: list[Mapping[str, Any]] = [*self.collectives]
            of = [
                ({"collective": r["collective"], "path": r["path"], **rank}, r[key]) for r in rows
            ]
            text += _metric(name, meaning, of)
        of = [({"state": state, **rank}, held[state]) for state in _STATES]
        meaning = "Memory that the ranks of a host share, in bytes, by state; the states overlap."
        text += _metric("smddp_memory_bytes", meaning, of)
        meaning = "Tensors in shared memory."
        text += _metric("smddp_memory_blocks", meaning, [(rank, held["blocks"])])
        meaning = "Requests for shared memory that got ordinary memory instead."
        text += _metric("smddp_memory_refused_total", meaning, [(rank, held["refused"])])
        meaning = "Messages from processes outside the job that this rank dropped."
        return text + _metric("smddp_refused_messages_total", meaning, [(rank, self.refused)])


def _metric(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{escaped(held)}"' for label, held in labels.items())
        lines.append(f"{name}{{{shown}}} {value!r}")
    return "\n".join([*lines, ""])


def escaped(value: str) -> str:
    """A label's value, as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _sent(row: extension.core.StatisticsRow) -> str:
    """``71.0 MB of 100.0 MB``; without coding one number."""
    from rich import filesize

    sent, raw = (filesize.decimal(row[key]) for key in ("sent_bytes", "sent_raw_bytes"))
    return sent if sent == raw else f"{sent} of {raw}"


def _is_fallback(row: extension.core.StatisticsRow) -> bool:
    return row["path"].startswith(backend.FALLBACK_PREFIX)


def take(rank: int) -> Snapshot:
    """The counters of this process now.

    Raises:
        ImportError: the extension is missing or was built for another torch.
    """
    return Snapshot(
        time.time(),
        rank,
        launchers.host_name(),
        backend.statistics(),
        memory.statistics(),
        backend.peer_statistics(),
    )


def path_of(name: str, rank: int, host: str) -> Path | None:
    """The file that a setting names, on the rank that writes it; None on the others.

    A name with ``{rank}`` is written by each rank, one with ``{host}`` by one rank of each host,
    another one by rank 0.
    """
    one_of_host = _HOST in name and os.environ.get("LOCAL_RANK", "0") == "0"
    if not name or not (_RANK in name or one_of_host or (_HOST not in name and rank == 0)):
        return None
    named = name.replace(_RANK, str(rank)).replace(_HOST, host.replace(os.sep, "_"))
    return Path(named).expanduser()


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


class CounterWriter:
    """The writes that one ``ledger`` section asks for."""

    def __init__(self, wanted: Ledger) -> None:
        self.wanted = wanted
        self._warned: set[Path | None] = set()
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
        wanted, taken = self.wanted, take(rank)
        due: list[tuple[str, Callable[[Path], None]]] = [
            (wanted.json_lines, lambda path: _append(path, taken.as_json())),
            (wanted.prometheus_file, lambda path: replace(path, taken.as_prometheus())),
        ]
        if last:
            due.append((wanted.json_file, lambda path: replace(path, taken.as_json(2))))
        for name, put in due:
            path = path_of(name, rank, taken.host)
            try:
                if path is not None:
                    put(path)
            except OSError as error:
                if path not in self._warned:
                    why = error.strerror or error
                    logger.warning("smddp: the counters can't be written to %s: %s", path, why)
                self._warned.add(path)
        if last and wanted.table and rank == 0:
            from rich.console import Console

            taken.show(Console(file=sys.stderr))

    def _run(self) -> None:
        while not self._stopped.wait(self.wanted.interval_seconds):
            try:
                self.write(last=False)
            except Exception as error:  # training goes on
                logger.warning("smddp: no counters are written any more: %s", error)
                return


_writer: CounterWriter | None = None
_at_exit = False


def follow(settings: Settings) -> None:
    """Starts, replaces or ends the writer; the settings call it when they apply."""
    global _writer, _at_exit
    wanted = settings.section.ledger
    if _writer is not None:
        if _writer.wanted == wanted:
            return
        _writer.stop()
        _writer = None
    if wanted.table or wanted.json_file or wanted.json_lines or wanted.prometheus_file:
        _writer = CounterWriter(wanted)
        if not _at_exit:
            _at_exit = True
            atexit.register(finish)
            os.register_at_fork(after_in_child=_forget)


def finish() -> None:
    """The last write of the process."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None and writer.stop():
        writer.write(last=True)


def _forget() -> None:
    global _writer
    _writer = None
