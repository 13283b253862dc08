"""Dataclasses as rows of CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
_Row = TypeVar("_Row")  # a dataclass whose fields have these types, or may be None


def _value(kind: str, text: str) -> Any:
    plain, optional, _ = kind.partition(" | None")
    return None if optional and not text else _TYPES[plain](text)


def read(kind: type[_Row], path: Path) -> list[_Row]:
    """A column that the file lacks has its default."""
    columns = [(f.name, str(f.type)) for f in fields(kind)]  # type: ignore[arg-type]
    with path.open(newline="") as file:
        return [
            kind(**{name: _value(text, line[name]) for name, text in columns if name in line})
            for line in csv.DictReader(file)
        ]


def write(path: Path, rows: Sequence[Any]) -> None:
    """Replaces the file when all rows are written."""
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
