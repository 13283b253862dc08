"""What users see of the results: the tables in docs/versions.md, and doctor's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from . import outcomes
from .cells import DEEPSPEED, PYTHON, SYSTEM, TORCH, matrix
from .environments import ROOT
from .outcomes import Result
from .phases import EQUAL

TRAINED = ROOT / "deepspeed_smddp/diagnostics/doctor/trained_versions.json"
BEGIN, END = "<!-- written by make test-versions -->", "<!-- end of the table -->"

# As in the results -> as in the tables.
_OUTCOMES = {"beside": "not chosen", "smddp": "over smddp", "resume": "resume"}
_FEATURES = {
    "gather": "gathers",
    "reduce": "reductions",
    "overlap": "overlap",
    "bucket sizes": "bucket sizes",
    "comms log": "log",
    "monitor": "monitor",
    "sharding": "sharding",
}
_FSDP2 = ["FSDP2", "FSDP2 overlap"]


def write_pages() -> None:
    """Puts the tables into docs/versions.md, and writes the list for doctor."""
    results = outcomes.read()
    path = ROOT / "docs/versions.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    text = whole(results)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    TRAINED.write_text(trained(results), "utf-8")


def trained(results: dict[str, Result]) -> str:
    """JSON: DeepSpeed, torch and Python of each cell whose losses over smddp equal Gloo's."""
    rows = [r for r in sorted(results.values(), key=_order) if r.get("smddp") == EQUAL]
    lines = [json.dumps([r["deepspeed"], r["torch"], r["python"]]) for r in rows]
    return "[\n " + ",\n ".join(lines) + "\n]\n"


def whole(results: dict[str, Result]) -> str:
    """A row per cell: versions of DeepSpeed, of torch and Python; then what failed."""
    rows = sorted(results.values(), key=_order)
    base = [r for r in rows if (r["torch"], r["python"]) == (TORCH, PYTHON)]
    others = [r for r in rows if r["deepspeed"] == DEEPSPEED]
    text = f"DeepSpeed's versions, with torch {TORCH} and Python {PYTHON}:\n\n"
    text += _table(["DeepSpeed", *_columns(), "needed besides"], map(_row_of_deepspeed, base))
    text += f"\ntorch's and Python's versions, with DeepSpeed {DEEPSPEED}:\n\n"
    text += _table(["torch", "Python", *_columns(), *_FSDP2], map(_row_of_torch, others))
    left = [cell for cell in matrix(tree=False) if cell.name not in results]
    if left:
        text += f"\nNot run: {'; '.join(cell.name for cell in left)}.\n"
    sentences = [f"- {_title(r)}: {outcomes.summary(r)}" for r in rows if _needs_a_sentence(r)]
    if sentences:
        text += "\nWhat the tables shorten:\n\n" + "\n".join(sentences) + "\n"
    return text


def _columns() -> list[str]:
    return [*_OUTCOMES.values(), *_FEATURES.values()]


def _row_of_deepspeed(result: Result) -> list[str]:
    system = [name for start, name in SYSTEM.items() if result["deepspeed"].startswith(start)]
    besides = ", ".join(f"`{name}`" for name in [*result["pins"], *system])
    return [result["deepspeed"], *_cells_of(result), besides]


def _row_of_torch(result: Result) -> list[str]:
    alone, ours = result.get("fsdp2 alone"), result.get("fsdp2", "")
    fsdp2 = "" if alone is None else "torch fails" if alone != "trains" else _short(ours)
    overlap = result.get("fsdp2 backward")
    said = "" if overlap is None else _yes(overlap)
    return [result["torch"], result["python"], *_cells_of(result), fsdp2, said]


def _cells_of(result: Result) -> list[str]:
    features = result.get("features")
    told = ["" if features is None else _yes(features[name]) for name in _FEATURES]
    if result["install"] != "installed":
        return ["not installed"] * len(_OUTCOMES) + told
    if result["alone"] != "trains":
        return ["DeepSpeed fails"] * len(_OUTCOMES) + told
    return [*(_outcome(result, name) for name in _OUTCOMES), *told]


def _outcome(result: Result, name: str) -> str:
    if name == "resume" and result.get("resume alone", EQUAL) != EQUAL:
        return "DeepSpeed fails"
    return _short(result.get(name, ""))


def _short(outcome: str) -> str:
    if outcome in ("", EQUAL):
        return outcome
    return "**differs**" if "losses" in outcome else "**fails**"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _order(result: Result) -> Any:
    numbers = [[int(p) for p in result[n].split(".")] for n in ("torch", "python")]
    version = result["deepspeed"]
    release = version.partition(" ")[0].split(".")
    deepspeed = [int(part) for part in release] if version[0].isdigit() else [99]
    return numbers, deepspeed, version


def _title(result: Result) -> str:
    return f"DeepSpeed {result['deepspeed']}, torch {result['torch']}, Python {result['python']}"


def _needs_a_sentence(result: Result) -> bool:
    found = [result.get(name) for name in _OUTCOMES]
    return (
        result.get("alone") != "trains"
        or any(outcome != EQUAL for outcome in found)
        or result.get("fsdp2", EQUAL) != EQUAL
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
