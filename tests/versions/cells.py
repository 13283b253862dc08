"""The cells of the matrix: which versions are installed together; and the results of each."""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TORCH, PYTHON, DEEPSPEED = "2.13.0", "3.11", "0.19.8"

DEEPSPEEDS = (
    *(f"0.14.{patch}" for patch in (0, 2, 3, 5)),
    *(f"0.15.{patch}" for patch in (0, 2, 4)),
    *(f"0.16.{patch}" for patch in range(10)),
    *(f"0.17.{patch}" for patch in range(7)),
    *(f"0.18.{patch}" for patch in range(10)),
    *(f"0.19.{patch}" for patch in range(9)),
)
# Run first, so that an interrupted run has what matters most.
FIRST = ("0.19.8", "0.16.9", "0.17.6", "0.18.9", "0.16.5", "0.16.0", "0.14.5", "0.15.4", "0.17.2")
FIRST += ("0.18.4", "0.19.2", "0.14.0", "0.15.0", "0.17.0", "0.18.0", "0.19.0", "0.19.4", "0.18.7")
TORCHES = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.12", "3.13")

TREE = "tree"  # in place of DeepSpeed's version: a source tree that the command names
SUPPORTED = (0, 16)  # DeepSpeed, from this minor version on
EQUAL = "equal"
FILE = Path(__file__).with_name("results.json")

Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Versions that are installed together."""

    deepspeed: str
    torch: str = TORCH
    python: str = PYTHON

    @property
    def name(self) -> str:
        """Identifies the cell in the results and on the command line."""
        return f"deepspeed {self.deepspeed}, torch {self.torch}, Python {self.python}"

    @property
    def venv(self) -> str:
        """The name of the venv; DeepSpeed's versions share one, one after the other."""
        return f"python{self.python}-torch{self.torch}"

    def head(self) -> Result:
        """What is known of it before it is run."""
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
        today = datetime.date.today().isoformat()
        return {**asdict(self), "date": today, "machine": f"{platform.machine()}, {system}"}


def matrix(tree: bool) -> list[Cell]:
    """All cells, in the order in which they are run; ``tree``: with a source tree of DeepSpeed."""
    rest = [version for version in reversed(DEEPSPEEDS) if version not in FIRST]
    cells = [Cell(version) for version in (*FIRST, *([TREE] if tree else []), *rest)]
    cells += [Cell(DEEPSPEED, torch=version) for version in TORCHES]
    cells += [Cell(DEEPSPEED, python=version) for version in PYTHONS]
    return cells


def read() -> dict[str, Result]:
    """The results by the cells' names."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def write(results: dict[str, Result]) -> None:
    """Stores them, one cell per line."""
    order = {cell.name: number for number, cell in enumerate(matrix(tree=True))}
    names = sorted(results, key=lambda name: (order.get(name, len(order)), name))
    lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in names]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def summary(result: Result) -> str:
    """One line."""
    if result["install"] != "installed":
        return f"not installed: {result['install']}"
    parts = [
        f"{name} {result[name]}"
        for name in ("alone", "beside", "smddp", "resume", "resume alone", "fsdp2 alone", "fsdp2")
        if name in result
    ]
    active = [name for name, on in result.get("features", {}).items() if on]
    return ", ".join([*parts, *(["with " + ", ".join(active)] if active else [])])


def is_bad(result: Result) -> bool:
    """Whether this package breaks a promise: no harm; where it is supported, Gloo's losses."""
    version = result["deepspeed"]
    supported = version == TREE or tuple(map(int, version.split(".")[:2])) >= SUPPORTED
    if result["install"] != "installed":
        return supported
    if result.get("fsdp2", EQUAL) != EQUAL:
        return True
    if result.get("alone") != "trains":
        return False  # DeepSpeed itself does not train here
    wanted = ("beside", "smddp", "resume") if supported else ("beside",)
    return any(result.get(name) != EQUAL for name in wanted)
