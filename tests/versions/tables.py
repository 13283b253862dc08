"""What users see of the results: the tables in docs/versions.md, and doctor's."""

from __future__ import annotations

import json
from typing import Any

from tests.jobs import ROOT, table

from . import cells
from .cells import DEEPSPEED, EQUAL, PYTHON, TORCH, TREE, Result, matrix

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
_YES = {True: "yes", False: "no", None: ""}
# Packages of the system that DeepSpeed needs on a CPU, by the start of its version.
_SYSTEM = {"0.14": "`numactl`", "0.15": "`numactl`"}


def write_pages() -> None:
    """Puts the tables into docs/versions.md, and writes the list for doctor."""
    results = cells.read()
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
    columns = [*_OUTCOMES.values(), *_FEATURES.values()]
    of_deepspeed = [
        [r["deepspeed"], *_cells_of(r), _SYSTEM.get(r["deepspeed"][:4], "")]
        for r in rows
        if (r["torch"], r["python"]) == (TORCH, PYTHON)
    ]
    of_torch = [
        [r["torch"], r["python"], *_cells_of(r), _fsdp2(r), _YES[r.get("fsdp2 backward")]]
        for r in rows
        if r["deepspeed"] == DEEPSPEED
    ]
    text = f"DeepSpeed's versions, with torch {TORCH} and Python {PYTHON}:\n\n"
    text += table(["DeepSpeed", *columns, "needed besides"], of_deepspeed)
    text += f"\ntorch's and Python's versions, with DeepSpeed {DEEPSPEED}:\n\n"
    text += table(["torch", "Python", *columns, "FSDP2", "FSDP2 overlap"], of_torch)
    left = [cell.name for cell in matrix(tree=False) if cell.name not in results]
    if left:
        text += f"\nNot run: {'; '.join(left)}.\n"
    sentences = [
        f"- DeepSpeed {r['deepspeed']}, torch {r['torch']}, Python {r['python']}: "
        f"{cells.summary(r)}\n"
        for r in rows
        if any(r.get(name) != EQUAL for name in _OUTCOMES) or r.get("fsdp2", EQUAL) != EQUAL
    ]
    return text + ("\nWhat the tables shorten:\n\n" if sentences else "") + "".join(sentences)


def _cells_of(result: Result) -> list[str]:
    features = result.get("features", {})
    told = [_YES[features.get(name)] for name in _FEATURES]
    if result["install"] != "installed":
        return ["not installed"] * len(_OUTCOMES) + told
    if result["alone"] != "trains":
        return ["DeepSpeed fails"] * len(_OUTCOMES) + told
    outcomes = [_short(result.get(name, "")) for name in _OUTCOMES]
    if result.get("resume alone", EQUAL) != EQUAL:
        outcomes[-1] = "DeepSpeed fails"
    return [*outcomes, *told]


def _fsdp2(result: Result) -> str:
    if result.get("fsdp2 alone", "trains") != "trains":
        return "torch fails"
    return _short(result.get("fsdp2", ""))


def _short(outcome: str) -> str:
    if outcome in ("", EQUAL):
        return outcome
    return "**differs**" if "losses" in outcome else "**fails**"


def _order(result: Result) -> Any:
    version = result["deepspeed"]
    release = "99" if version == TREE else version.partition(" ")[0]
    releases = (result["torch"], result["python"], release)
    return [[int(part) for part in release.split(".")] for release in releases], version
