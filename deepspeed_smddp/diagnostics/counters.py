"""The counters of the collectives, written to where people look: a table, files, Prometheus."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import filesize
from rich.console import Console
from rich.table import Table

from deepspeed_smddp.config.sections import Ledger
from deepspeed_smddp.config.settings import Settings
from deepspeed_smddp.distributed import backend, launchers, memory
from deepspeed_smddp.errors import logger

if TYPE_CHECKING:
    from deepspeed_smddp._C import MemoryStatistics, StatisticsRow


VERSION = 1  # of the object that as_object() returns
_REFUSED = "refused"  # the row that counts dropped messages; it is no collective


@dataclass(frozen=True)
class Snapshot:
    """What :func:`deepspeed_smddp.statistics` returns, with the time, the rank and the memory.

    ``time`` is in seconds since the epoch.
    """

    time: float
    rank: int
    host: str
    rows: list[StatisticsRow]
    memory: MemoryStatistics
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def collectives(self) -> list[StatisticsRow]:
        """The rows of collectives: smddp's own first, then those that Gloo or NCCL carried out."""
        rows = [row for row in self.rows if row["collective"] != _REFUSED]
        return sorted(rows, key=lambda r: (is_fallback(r), r["collective"], r["path"]))

    @property
    def refused(self) -> int:
        """Messages from outside the job that this rank dropped."""
        return sum(row["calls"] for row in self.rows if row["collective"] == _REFUSED)

    def as_object(self) -> dict[str, Any]:
        """For JSON. Seconds are floats, sizes are bytes; counters run since the last reset."""
        return {
            "version": VERSION,
            "time": round(self.time, 3),
            "rank": self.rank,
            "host": self.host,
            "refused_messages": self.refused,
            "rows": [dict(row) for row in self.collectives],
            "peers": self.peers,
            "memory": dict(self.memory),
        }

    def as_json(self, indent: int | None = None) -> str:
        """The object as text that ends with a newline; without ``indent``, one line."""
        return json.dumps(self.as_object(), indent=indent) + "\n"


def is_fallback(row: StatisticsRow) -> bool:
    """Whether Gloo or NCCL carried the operations out."""
    return row["path"].startswith(backend.FALLBACK_PREFIX)


def take(rank: int) -> Snapshot:
    """The counters of this process now; the extension is loaded.

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


_RANK, _HOST = "{rank}", "{host}"


def writes(name: str, rank: int) -> bool:
    """Whether this process writes the file: each rank, one rank of each host, or rank 0 alone.

    Args:
        name: the setting; it may hold ``{rank}`` and ``{host}``.
        rank: this process's rank in the default group.
    """
    if not name or _RANK in name:
        return bool(name)
    if _HOST in name:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return rank == 0


def path_of(name: str, rank: int, host: str) -> Path:
    """The file that the setting names, on this rank."""
    named = name.replace(_RANK, str(rank)).replace(_HOST, host.replace(os.sep, "_"))
    return Path(named).expanduser()


def replace(path: Path, text: str) -> None:
    """Writes the whole file, or leaves it as it was.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append(path: Path, line: str) -> None:
    """Adds a line in one write.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


# The key of a row -> the metric's name and help.
_OF_ROWS: tuple[tuple[Literal["calls", "bytes", "seconds", "wait_seconds"], str, str], ...] = (
    ("calls", "smddp_calls_total", "Collective operations of this rank."),
    ("bytes", "smddp_bytes_total", "Bytes of all ranks' blocks: outputs gathered, inputs reduced."),
    ("seconds", "smddp_seconds_total", "Seconds from the calls to their completion, summed."),
    ("wait_seconds", "smddp_wait_seconds_total", "Seconds that callers spent in wait()."),
)
# States of shared memory, in bytes.
_STATES: tuple[Literal["in_use", "peak", "reserved", "kept", "huge"], ...] = (
    "in_use",
    "peak",
    "reserved",
    "kept",
    "huge",
)


def text(snapshot: Snapshot) -> str:
    """The whole file. Several ranks' files in one folder agree on types and help texts."""
    return "".join(f"{line}\n" for line in _lines(snapshot))


def _lines(snapshot: Snapshot) -> Iterator[str]:
    rank = {"rank": str(snapshot.rank)}
    for key, name, meaning in _OF_ROWS:
        samples = [
            ({"collective": row["collective"], "path": row["path"], **rank}, row[key])
            for row in snapshot.collectives
        ]
        yield from _metric(name, "counter", meaning, samples)
    memory = snapshot.memory
    yield from _metric(
        "smddp_memory_bytes",
        "gauge",
        "Memory that the ranks of a host share, in bytes, by state; the states overlap.",
        [({"state": state, **rank}, memory[state]) for state in _STATES],
    )
    yield from _metric(
        "smddp_memory_blocks", "gauge", "Tensors in shared memory.", [(rank, memory["blocks"])]
    )
    yield from _metric(
        "smddp_memory_refused_total",
        "counter",
        "Requests for shared memory that got ordinary memory instead.",
        [(rank, memory["refused"])],
    )
    yield from _metric(
        "smddp_refused_messages_total",
        "counter",
        "Messages from processes outside the job that this rank dropped.",
        [(rank, snapshot.refused)],
    )


def _metric(
    name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{label}="{escaped(held)}"' for label, held in labels.items())
        yield f"{name}{{{shown}}} {value!r}"


def escaped(value: str) -> str:
    """A label's value, as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def show(snapshot: Snapshot, console: Console) -> None:
    """Prints the collectives; what Gloo or NCCL carried out is yellow, and has no times."""
    table = Table(title=f"smddp: collectives of rank {snapshot.rank}", title_justify="left")
    table.add_column("collective")
    table.add_column("path")
    for column in ("calls", "bytes", "time", "wait time"):
        table.add_column(column, justify="right")
    for row in snapshot.collectives:
        foreign = is_fallback(row)
        times = ["-", "-"]
        if not foreign:
            times = [f"{row[key]:.3f} s" for key in ("seconds", "wait_seconds")]
        style = "yellow" if foreign else None
        size = filesize.decimal(row["bytes"])
        table.add_row(
            row["collective"], row["path"], f"{row['calls']:,}", size, *times, style=style
        )
    console.print(table)
    if snapshot.refused:
        console.print(f"{snapshot.refused:,} messages from outside the job were refused.")


_JOIN_SECONDS = 5.0  # a write to a file system that hangs does not hold up the end for longer


class CounterWriter:
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
        wanted, taken = self.wanted, take(rank)
        self._file(wanted.json_lines, taken, lambda path: append(path, taken.as_json()))
        self._file(
            wanted.prometheus_file,
            taken,
            lambda path: replace(path, text(taken)),
        )
        if not last:
            return
        self._file(wanted.json_file, taken, lambda path: replace(path, taken.as_json(2)))
        if wanted.table and rank == 0:
            _print(taken)

    def _file(self, name: str, taken: Snapshot, write: Callable[[Path], None]) -> None:
        if not writes(name, taken.rank):
            return
        path = path_of(name, taken.rank, taken.host)
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


_reporter: CounterWriter | None = None
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
        _reporter = CounterWriter(wanted)
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

    show(taken, Console(file=sys.stderr))
