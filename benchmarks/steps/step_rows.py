"""One competitor's turn as a row of the CSV file, and figures over all turns of a setting."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .hiding import Trace
from .trainers import FREE


@dataclass
class Row:
    """README.md defines the columns."""

    date: str
    machine: str
    versions: str
    workload: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    parameters: int
    changes: str  # to the DeepSpeed config, as JSON
    hosts: int
    ranks_per_host: int
    rate: str  # without links empty, as all columns about links
    nics: int | None
    competitor: str
    version: str
    turn: int
    steps: int
    step_ms: float
    samples_per_second: float
    tflops_per_rank: float
    call_ms: float
    own_wait_ms: float | None
    compute_ms: float
    cpu_ms: float
    wire_bytes: float | None
    gathered_bytes: float
    scattered_bytes: float
    reduced_bytes: float
    least_wire_bytes: float | None = None
    ceiling: float | None = None  # bytes per second
    loss: float = 0.0
    loss_difference: float | None = None
    scheme: str = "ZeRO-3"  # how the state is divided
    backward_ms: float | None = None
    exposed_ms: float | None = None
    crossed_bytes: float | None = None
    trace: str = ""  # JSON: hiding.Trace

    @property
    def hideable_bytes(self) -> float | None:
        if not self.trace or not self.ceiling:
            return None
        return Trace.read(self.trace).hideable(self.hosts, self.ceiling)

    @property
    def without_transfer_ms(self) -> float | None:
        """The part of the step in which no bucket crosses."""
        return self.step_ms - Trace.read(self.trace).in_transfer_ms() if self.trace else None

    @property
    def hidden_share(self) -> float | None:
        """The share of this competitor's transfer that had crossed by the last gradient, divided by
        the share of the least transfer that can have crossed by then."""
        most = self.hideable_bytes
        if not most or not self.least_wire_bytes or not self.wire_bytes:
            return None
        return ((self.crossed_bytes or 0.0) / self.wire_bytes) / (most / self.least_wire_bytes)

    def setting(self) -> tuple[object, ...]:
        """Rows are compared if they have this in common."""
        return (
            *(self.scheme, self.workload, self.layers, self.hidden, self.vocabulary),
            *(self.sequence, self.batch, self.changes),
            *(self.hosts, self.ranks_per_host, self.rate, self.nics),
        )


@dataclass
class Setting:
    """All rows of one setting; figures are medians over the turns."""

    rows: list[Row] = field(default_factory=list)

    def names(self) -> list[str]:
        return [n for n in dict.fromkeys(row.competitor for row in self.rows) if n != FREE]

    def of(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.competitor == name]

    def median(self, name: str, column: str) -> float | None:
        found = [value for row in self.of(name) if (value := getattr(row, column)) is not None]
        return statistics.median(found) if found else None

    def ratios(self, column: str, over: str, under: str) -> list[float]:
        """Of one competitor's column to another's, turn by turn."""
        below = {row.turn: getattr(row, column) for row in self.of(under)}
        return [
            getattr(row, column) / below[row.turn] for row in self.of(over) if row.turn in below
        ]

    @property
    def compute_ms(self) -> float | None:
        """The same step if communication took no time."""
        return self.median(FREE, "compute_ms")

    @property
    def wire_ms(self) -> float | None:
        """The time of the links for the bytes that must cross them, at the practical ceiling."""
        least, ceiling = self.median(FREE, "least_wire_bytes"), self.median(FREE, "ceiling")
        return None if least is None or not ceiling else 1000 * least / ceiling

    @property
    def bound_ms(self) -> float | None:
        """The lower bound of a step."""
        if self.compute_ms is None:
            return None
        return max(self.compute_ms, self.wire_ms or 0.0)

    @property
    def least_ms(self) -> float | None:
        """``wire_ms``, and the part of a step in which no bucket can cross if communication took no
        time: before the first bucket is full, and after the backward pass."""
        without = self.median(FREE, "without_transfer_ms")
        return None if without is None or self.wire_ms is None else without + self.wire_ms

    def samples(self, step_ms: float) -> float:
        """Samples per second of all ranks together."""
        row = self.rows[0]
        return 1000 * row.batch * row.hosts * row.ranks_per_host / step_ms

    def waited_ms(self, name: str) -> float | None:
        """Time in communication calls. smddp's counter also has calls that bypass torch."""
        calls, own = self.median(name, "call_ms"), self.median(name, "own_wait_ms")
        return calls if own is None or calls is None else max(calls, own)

    def lost_ms(self, name: str) -> float | None:
        step = self.median(name, "step_ms")
        return None if step is None or self.compute_ms is None else step - self.compute_ms


def settings(rows: Iterable[Row]) -> list[Setting]:
    found: dict[tuple[object, ...], Setting] = {}
    for row in rows:
        found.setdefault(row.setting(), Setting()).rows.append(row)
    return list(found.values())


def title(rows: Sequence[Row]) -> str:
    row = rows[0]
    if row.rate:
        where = f"{row.hosts} hosts x {row.ranks_per_host}, {row.nics} x {row.rate}"
    elif row.hosts > 1:
        where = f"{row.hosts} x {row.ranks_per_host} by name"
    else:
        where = f"one host, {row.ranks_per_host} ranks"
    return f"{row.scheme}, {where}, {row.batch * row.sequence} tokens per rank"
