"""The results of the matrix, as JSON in this folder, and the page that is made of them."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from .cells import DEEPSPEED, PYTHON, SYSTEM, TORCH, Cell, matrix
from .environments import ROOT
from .phases import EQUAL

FILE = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs/versions.md"
BEGIN, END = "<!-- written by make test-versions -->", "<!-- end of the table -->"

SUPPORTED = (0, 16)  # DeepSpeed, from this minor version on
_FEATURES = {
    "gather": "gathers",
    "reduce": "reductions",
    "overlap": "overlap",
    "bucket sizes": "bucket sizes",
    "comms log": "log",
    "monitor": "monitor",
    "sharding": "sharding",
}

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
        for name in ("alone", "beside", "smddp", "resume")
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
    if result.get("alone") != "trains":
        return False  # DeepSpeed itself does not train here
    if result["beside"] != EQUAL:
        return True
    supported = minor(result) >= SUPPORTED
    return supported and (result["smddp"] != EQUAL or result.get("resume") != EQUAL)


def write_page() -> None:
    """Puts the tables into docs/versions.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(read())}\n{END}{rest.split(END)[1]}", "utf-8")


def tables(results: dict[str, Result]) -> str:
    """The page's tables: versions of DeepSpeed, of torch, of Python; then what failed."""
    rows = sorted(results.values(), key=_order)
    base = [r for r in rows if (r["torch"], r["python"]) == (TORCH, PYTHON)]
    others = [r for r in rows if r not in base]
    text = f"DeepSpeed's versions, with torch {TORCH} and Python {PYTHON}:\n\n{_table(base)}\n"
    title = f"torch's and Python's versions, with DeepSpeed {DEEPSPEED}"
    text += f"{title}:\n\n{_table(others)}\n" if others else f"{title}: not run yet.\n\n"
    left = [cell.deepspeed for cell in matrix(tree=False) if cell.name not in results]
    if left := [version for version in left if version != DEEPSPEED]:
        text += f"DeepSpeed's versions that have not been run: {', '.join(sorted(left))}.\n\n"
    sentences = [f"- {_title(r)}: {summary(r)}" for r in rows if _needs_a_sentence(r)]
    if sentences:
        text += "What the table shortens:\n\n" + "\n".join(sentences) + "\n"
    return text


def _order(result: Result) -> Any:
    numbers = [
        [int(p) for p in result[n].partition("+")[0].split(".")] for n in ("torch", "python")
    ]
    version = result["deepspeed"]
    release = version.partition(" ")[0].split(".")
    deepspeed = [int(part) for part in release] if version[0].isdigit() else [99]
    return numbers, deepspeed, version


def _title(result: Result) -> str:
    return f"DeepSpeed {result['deepspeed']}, torch {result['torch']}, Python {result['python']}"


def _needs_a_sentence(result: Result) -> bool:
    outcomes = (result.get(name) for name in ("beside", "smddp", "resume"))
    return result.get("alone") != "trains" or any(o != EQUAL for o in outcomes)


def _table(results: list[Result]) -> str:
    head = ["DeepSpeed", "torch", "Python", "not chosen", "over smddp", "resume"]
    head += [*_FEATURES.values(), "needed besides"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for result in results:
        row = [result["deepspeed"], result["torch"], result["python"]]
        row += [_short(result, name) for name in ("beside", "smddp", "resume")]
        found = result.get("features")
        row += ["" if found is None else ("yes" if found[name] else "no") for name in _FEATURES]
        system = [name for start, name in SYSTEM.items() if result["deepspeed"].startswith(start)]
        row.append(", ".join(f"`{name}`" for name in [*result["pins"], *system]))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _short(result: Result, name: str) -> str:
    if result["install"] != "installed":
        return "not installed"
    if result["alone"] != "trains":
        return "DeepSpeed fails"
    outcome = result.get(name)
    if outcome is None:
        return ""
    return outcome if outcome == EQUAL else "**differs**" if "losses" in outcome else "**fails**"
