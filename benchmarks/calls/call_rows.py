"""A competitor's figures in one case, as a row of the CSV file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Row:
    """README.md defines the columns."""

    date: str
    machine: str
    versions: str
    op: str
    dtype: str
    bytes: int
    hosts: int
    ranks_per_host: int
    rate: str  # without links empty, as all columns about links
    nics: int | None
    competitor: str
    version: str
    median_us: float
    min_us: float
    p90_us: float
    utilisation: float | None
    of_ceiling: float | None
    wire_ratio: float | None
    drops: int | None
    cpu_us: float
    iterations: int
    turns: int
    checked: str = "all elements"
    turns_us: str = ""  # the time of a call in each turn, in order

    def key(self) -> tuple[object, ...]:
        """Identifies a measurement: --resume skips a key that the file holds."""
        return (
            *(self.op, self.dtype, self.bytes, self.hosts, self.ranks_per_host),
            *(self.rate, self.nics, self.competitor),
        )

    def times(self) -> list[float]:
        """Microseconds of a call, turn by turn; empty for files that lack the column."""
        return [float(text) for text in self.turns_us.split()]
