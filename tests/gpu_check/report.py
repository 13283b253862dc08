"""One page of all results, to be attached to an issue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_check.catalogue import STEPS
from gpu_check.step import MISSED, PASSED, SKIPPED, read_result

TITLE = "# deepspeed-smddp on GPUs\n"
LONGEST_VALUE = 600  # characters of one result


def write(folder: Path) -> Path:
    """Writes ``report.md`` from the results in ``folder``; returns its path."""
    found = {step.name: read_result(folder / f"{step.name}.json") for step in STEPS}
    results = {name: result for name, result in found.items() if result is not None}
    parts = [TITLE, summary(results), *machine(results), table(results), goals(results)]
    parts += [details(result) for result in results.values() if result["status"] != SKIPPED]
    path = folder / "report.md"
    path.write_text("\n".join(part for part in parts if part))
    return path


def summary(results: dict[str, dict[str, Any]]) -> str:
    """The first sentence: how much of it was shown."""
    states = [result["status"] for result in results.values()]
    passed, missed = states.count(PASSED), states.count(MISSED)
    skipped = states.count(SKIPPED)
    failed = len(states) - passed - missed - skipped
    return (
        f"{len(STEPS)} steps: {passed} passed, {missed} ran but missed a goal, {failed} failed, "
        f"{skipped} did not apply, {len(STEPS) - len(states)} have not run.\n"
    )


def machine(results: dict[str, dict[str, Any]]) -> list[str]:
    """The facts that the last step that looked has noted."""
    for name in ("machine", "build"):
        facts = results.get(name, {}).get("results", {}).get("machine")
        if facts:
            lines = [f"- {key}: {cell(value)}" for key, value in facts.items()]
            return ["## Machine\n", "\n".join(lines) + "\n"]
    return []


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each step."""
    lines = ["## Steps\n", "| step | what it shows | result | s |", "|---|---|---|---|"]
    for step in STEPS:
        result = results.get(step.name)
        if result is None:
            lines.append(f"| {step.name} | {step.title} | has not run | |")
            continue
        said = f": {cell(result['sentence'])}" if result["sentence"] else ""
        seconds = f"{result['seconds']:.0f}"
        lines.append(f"| {step.name} | {step.title} | {result['status']}{said} | {seconds} |")
    return "\n".join(lines) + "\n"


def goals(results: dict[str, dict[str, Any]]) -> str:
    """What the project promises, and what this machine showed."""
    rows = [
        f"| {name} | {cell(goal['what'])} | {'met' if goal['met'] else '**missed**'} "
        f"| {cell(goal['value'])} |"
        for name, result in results.items()
        for goal in result["goals"]
    ]
    head = ["## Goals\n", "| step | goal | | value |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n" if rows else ""


def details(result: dict[str, Any]) -> str:
    """All results of one step."""
    lines = [f"## {result['step']}: {result['title']}\n"]
    lines.append(f"{result['status']}; source {result['source']}, {result['gpus']} GPUs\n")
    if result["sentence"]:
        lines.append(f"{result['sentence']}\n")
    rows = [
        f"- {name}: {cell(value)}" for name, value in result["results"].items() if name != "machine"
    ]
    return "\n".join([*lines, *rows]) + "\n"


def cell(value: Any) -> str:
    """A value on one line of Markdown."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = " ".join(str(value).replace("|", "\\|").split())
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
