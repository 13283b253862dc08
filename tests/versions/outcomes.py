"""The results of the matrix, as JSON in this folder, and whether they are as promised."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from .cells import Cell, matrix
from .phases import EQUAL

FILE = Path(__file__).with_name("results.json")
SUPPORTED = (0, 16)  # DeepSpeed, from this minor version on

Result = dict[str, Any]


def head(cell: Cell) -> Result:
    """What is known of a cell before it is run."""
    return {
        "deepspeed": cell.deepspeed,
        "torch": cell.torch,
        "python": cell.python,
        "pins": list(cell.pins),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {platform.freedesktop_os_release()['PRETTY_NAME']}",
    }


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


def minor(result: Result) -> tuple[int, int]:
    """DeepSpeed's major and minor version."""
    major, minor, *_ = result["deepspeed"].split(".")
    return int(major), int(minor)


def is_bad(result: Result) -> bool:
    """Whether this package breaks a promise: no harm; where it is supported, Gloo's losses."""
    if result["install"] != "installed":
        return minor(result) >= SUPPORTED
    if result.get("fsdp2", EQUAL) != EQUAL:
        return True
    if result.get("alone") != "trains":
        return False  # DeepSpeed itself does not train here
    if result["beside"] != EQUAL:
        return True
    supported = minor(result) >= SUPPORTED
    return supported and (result["smddp"] != EQUAL or result.get("resume") != EQUAL)
