"""One page of all results, to be attached to an issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import table

from gpu_check.catalogue import STEPS
from gpu_check.step import MISSED, PASSED, SKIPPED, read_result

LONGEST_VALUE = 600  # characters of one result


def write(folder: Path) -> Path:
    """Writes ``report.md`` from the results in ``folder``; returns its path."""
    found = {step.name: read_result(folder, step) for step in STEPS}
    results = {name: result for name, result in found.items() if result is not None}
    path = folder / "report.md"
    path.write_text("\n".join(filter(None, page(results))))
    return path


def page(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The page, part by part; each ends with a newline."""
    count = Counter(result["status"] for result in results.values())
    failed = len(results) - count[PASSED] - count[MISSED] - count[SKIPPED]
    yield "# deepspeed-smddp on GPUs\n"
    yield (
        f"{len(STEPS)} steps: {count[PASSED]} passed, {count[MISSED]} ran but missed a goal, "
        f"{failed} failed, {count[SKIPPED]} did not apply, {len(STEPS) - len(results)} have not "
        "run.\n"
    )
    looks = [results[name]["results"] for name in ("machine", "build") if name in results]
    facts = next((look["machine"] for look in looks if "machine" in look), None)
    if facts:
        yield "## Machine\n"
        yield "".join(f"- {key}: {cell(value)}\n" for key, value in facts.items())
    yield "## Steps\n"
    yield table(
        ["step", "what it shows", "result", "s"], (row(results.get(s.name), s) for s in STEPS)
    )
    goals = [
        [name, cell(goal["what"]), "met" if goal["met"] else "**missed**", cell(goal["value"])]
        for name, result in results.items()
        for goal in result["goals"]
    ]
    if goals:
        yield "## Goals\n"
        yield table(["step", "goal", "", "value"], goals)
    for name, result in results.items():
        if result["status"] != SKIPPED:
            yield f"## {name}: {result['title']}\n"
            yield f"{result['status']}; source {result['source']}, {result['gpus']} GPUs\n"
            yield f"{result['sentence']}\n" if result["sentence"] else ""
            noted = result["results"].items()
            yield "".join(f"- {key}: {cell(value)}\n" for key, value in noted if key != "machine")


def row(result: dict[str, Any] | None, step: Any) -> list[str]:
    """A step's row of the table."""
    if result is None:
        return [step.name, step.title, "has not run", ""]
    said = f": {cell(result['sentence'])}" if result["sentence"] else ""
    return [step.name, step.title, f"{result['status']}{said}", f"{result['seconds']:.0f}"]


def cell(value: Any) -> str:
    """A value on one line of Markdown."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = " ".join(str(value).replace("|", "\\|").split())
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
