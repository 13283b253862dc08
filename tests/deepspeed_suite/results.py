"""The outcomes of DeepSpeed's tests over each backend, and the failures of smddp alone."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

# "crashed": the process of the test ended, or the test took too long. "late": all tests of a file.
OUTCOMES = ("passed", "failed", "error", "crashed", "late", "skipped")
BAD = frozenset({"failed", "error", "crashed", "late"})
REFERENCE = "gloo"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test over one backend."""

    test: str  # file::class::name, the file below DeepSpeed's folder "tests"
    backend: str
    outcome: str
    seconds: float
    message: str

    @property
    def file(self) -> str:
        """The file that the test is in."""
        return self.test.partition("::")[0]


Results = Mapping[str, Mapping[str, Outcome]]  # by backend, by test


def read(path: Path, file: str, backend: str) -> dict[str, Outcome]:
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
    return found


def worse(results: Results, backend: str) -> list[tuple[Outcome, Outcome | None]]:
    """Tests that fail over ``backend`` but not over the reference, with the reference's outcome."""
    reference = results.get(REFERENCE, {})
    found = []
    for test, outcome in results[backend].items():
        other = reference.get(test)
        if outcome.outcome in BAD and (other is None or other.outcome not in BAD):
            found.append((outcome, other))
    return found


def write(results: Results, folder: Path, facts: Mapping[str, str]) -> None:
    """Writes ``results.json`` with everything, ``results.csv`` with one row per test."""
    rows = [asdict(o) for by_test in results.values() for o in by_test.values()]
    (folder / "results.json").write_text(json.dumps({"facts": facts, "tests": rows}, indent=1))
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Outcome.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(rows)


def table(results: Results) -> str:
    """Counts by file and backend, in Markdown."""
    backends = list(results)
    counts = {
        backend: {
            file: Counter(o.outcome for o in by_test.values() if o.file == file)
            for file in sorted({o.file for o in by_test.values()})
        }
        for backend, by_test in results.items()
    }
    files = sorted({file for by_file in counts.values() for file in by_file})
    lines = [
        "| file | " + " | ".join(backends) + " |",
        "|---|" + "---|" * len(backends),
    ]
    for file in files:
        cells = [_count(counts[backend].get(file, Counter())) for backend in backends]
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    totals = [_count(sum(counts[backend].values(), Counter())) for backend in backends]
    lines.append("| **together** | " + " | ".join(totals) + " |")
    return "\n".join(lines)


def failures(results: Results) -> str:
    """All failures, in Markdown; parametrised tests with equal messages share a row."""
    together: dict[tuple[str, str, str, str], list[str]] = {}
    for backend, by_test in results.items():
        for outcome in by_test.values():
            if outcome.outcome in BAD:
                place = outcome.test.partition("[")[0]
                key = (place, outcome.outcome, outcome.message, backend)
                together.setdefault(key, []).append(outcome.test)
    lines = ["| tests | backend | outcome | count | message |", "|---|---|---|---|---|"]
    for (place, what, message, backend), tests in sorted(together.items()):
        words = message.replace("|", "\\|")[:160]
        lines.append(f"| {place} | {backend} | {what} | {len(tests)} | {words} |")
    return "\n".join(lines) if together else "None."


def _count(counter: Counter[str]) -> str:
    return ", ".join(f"{counter[name]} {name}" for name in OUTCOMES if counter[name]) or "none"
