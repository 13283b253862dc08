"""The outcomes of DeepSpeed's tests over each backend, and the failures of smddp alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests import jobs

# "crashed": the process of the test ended, or the test took too long. "late": all tests of a file.
OUTCOMES = ("passed", "failed", "error", "crashed", "late", "skipped")
BAD = frozenset({"failed", "error", "crashed", "late"})
REFERENCE = "gloo"


class Outcome(NamedTuple):
    """The outcome of one test over one backend."""

    test: str  # file::class::name, the file below DeepSpeed's folder "tests"
    backend: str
    outcome: str
    seconds: float
    message: str


def read(path: Path, file: str, backend: str) -> list[Outcome]:
    """The outcomes in a report of pytest (JUnit's XML)."""
    module = file.removesuffix(".py").replace("/", ".")
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        inside = case.get("classname", "").removeprefix(module).lstrip(".")
        test = "::".join(filter(None, (file, inside, case.get("name"))))
        what, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                what = "failed" if child.tag == "failure" else child.tag
                message = " ".join((child.get("message") or child.text or "").split())[:300]
        if "crashed while running" in message:
            what = "crashed"
        found[test] = Outcome(test, backend, what, float(case.get("time", 0)), message)
    return list(found.values())


def worse(found: Sequence[Outcome]) -> list[tuple[Outcome, str]]:
    """Tests that fail over another backend than the reference, with the reference's outcome."""
    reference = {o.test: o.outcome for o in found if o.backend == REFERENCE}
    return [
        (o, reference.get(o.test, "not run"))
        for o in found
        if o.outcome in BAD and reference.get(o.test) not in BAD
    ]


def counts(found: Sequence[Outcome]) -> str:
    """How many tests had which outcome."""
    counter = Counter(outcome.outcome for outcome in found)
    return ", ".join(f"{counter[name]} {name}" for name in OUTCOMES if counter[name]) or "none"


def table(found: Sequence[Outcome]) -> str:
    """Counts by file and backend, in Markdown."""
    backends = list(dict.fromkeys(o.backend for o in found))
    cells: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in sorted(found):
        for row in (outcome.test.partition("::")[0], "**together**"):
            cells.setdefault(row, {}).setdefault(outcome.backend, []).append(outcome)
    cells["**together**"] = cells.pop("**together**", {})  # the last row
    rows = [[row, *(counts(by.get(b, [])) for b in backends)] for row, by in cells.items()]
    return jobs.table(["file", *backends], rows)


def failures(found: Sequence[Outcome]) -> str:
    """All failures, in Markdown; parametrised tests with equal messages share a row."""
    together = Counter(
        (o.test.partition("[")[0], o.backend, o.outcome, o.message.replace("|", "\\|")[:160])
        for o in found
        if o.outcome in BAD
    )
    if not together:
        return "None.\n"
    rows = [[*row[:3], count, row[3]] for row, count in sorted(together.items())]
    return jobs.table(["tests", "backend", "outcome", "count", "message"], rows)
