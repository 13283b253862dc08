"""Results as rows of a CSV file, written again after every case."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


@dataclass
class Row:
    """One competitor in one case. README.md defines the columns."""

    date: str
    machine: str
    versions: str
    op: str
    dtype: str
    bytes: int
    hosts: int
    ranks_per_host: int
    rate: str  # empty, like all about links, where there is none
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

    def key(self) -> tuple[object, ...]:
        """What a measurement is of: --resume skips a key that the file holds."""
        return (
            *(self.op, self.dtype, self.bytes, self.hosts, self.ranks_per_host),
            *(self.rate, self.nics, self.competitor),
        )


_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
_Kind = TypeVar("_Kind")  # a dataclass of such fields


def _value(kind: str, text: str) -> Any:
    plain, optional, _ = kind.partition(" | None")
    return None if optional and not text else _TYPES[plain](text)


def read(path: Path) -> list[Row]:
    return read_as(Row, path)


def read_as(kind: type[_Kind], path: Path) -> list[_Kind]:
    """Of a file that lacks a column, the column's default."""
    columns = [(f.name, str(f.type)) for f in fields(kind)]  # type: ignore[arg-type]
    with path.open(newline="") as file:
        return [
            kind(**{name: _value(text, line[name]) for name, text in columns if name in line})
            for line in csv.DictReader(file)
        ]


def write(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".part")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[f.name for f in fields(rows[0])])
        writer.writeheader()
        for row in rows:
            values = asdict(row)
            for name, value in values.items():
                if isinstance(value, float):
                    values[name] = f"{value:.2f}" if name.endswith("_us") else f"{value:.4f}"
            writer.writerow(values)
    fresh.replace(path)


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def versions() -> str:
    """Of what lies under all competitors."""
    found = [f"Linux {platform.release()}", f"Python {platform.python_version()}"]
    # In a process of its own: loaded libfabric replaces the handlers of signals, Ctrl-C's too.
    library = os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1"
    code = f"import ctypes; print(ctypes.CDLL({library!r}).fi_version())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if told.returncode == 0:
        version = int(told.stdout)
        found.append(f"libfabric {version >> 16}.{version & 0xFFFF}")
    return "; ".join(found)


def source_version(root: Path) -> str:
    """The commit that is measured, with a + where the tree differs from it."""
    told = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"
