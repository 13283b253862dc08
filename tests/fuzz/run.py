"""Runs the fuzz targets of a build one after the other, and prints what each reached and found.

Called by ``make fuzz``. New inputs are kept in the build folder; ``--merge`` puts the few that
reach most into ``tests/fuzz/corpus``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_LARGEST_INPUT = 4096  # bytes
_LONGEST_INPUT = 20  # seconds
_MOST_MEMORY = 2048  # MiB
# Files that --merge keeps of a target.
_MOST_FILES = 40
_STATE = re.compile(rb"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", re.MULTILINE)


@dataclass
class Outcome:
    """What one target has reached: inputs run, edges and features covered, files of its corpus."""

    target: str
    seconds: float
    runs: int = 0
    edges: int = 0
    features: int = 0
    corpus: int = 0
    findings: int = 0

    def row(self) -> str:
        """One line of the table."""
        return (
            f"{self.target:<14} {self.seconds:>7.0f} {self.runs:>11,} {self.edges:>7,} "
            f"{self.features:>9,} {self.corpus:>7,} {self.findings:>9}"
        )


HEADING = (
    f"{'target':<14} {'seconds':>7} {'runs':>11} {'edges':>7} {'features':>9} {'corpus':>7} "
    f"{'findings':>9}"
)


def fuzz(build: Path, target: str, seconds: int) -> Outcome:
    """Runs one target for some seconds, or until it finds something."""
    kept, seeds = build / "corpus" / target, build / "tests" / "fuzz" / "corpus" / target
    findings = build / "findings" / target
    for folder in (kept, findings, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    log = build / f"{target}.log"
    begin = time.monotonic()
    command = [
        str(build / "tests" / "fuzz" / f"fuzz_{target}"),
        f"-max_total_time={seconds}",
        f"-max_len={_LARGEST_INPUT}",
        f"-timeout={_LONGEST_INPUT}",
        f"-rss_limit_mb={_MOST_MEMORY}",
        f"-artifact_prefix={findings}/",
        str(kept),
        str(seeds),
    ]
    environment = {**os.environ, "SMDDP_LOG_LEVEL": "error"}
    with log.open("wb") as out:
        ended = subprocess.run(command, stdout=out, stderr=out, env=environment)
    outcome = Outcome(target, time.monotonic() - begin)
    outcome.runs, outcome.edges, outcome.features = _state(log)
    outcome.corpus = sum(1 for _ in kept.iterdir())
    outcome.findings = int(ended.returncode != 0)
    if ended.returncode != 0:
        print(f"{target} has found something: see {findings} and {log}", file=sys.stderr)
    return outcome


def _state(log: Path) -> tuple[int, int, int]:
    found = _STATE.findall(log.read_bytes())
    return (int(found[-1][0]), int(found[-1][1]), int(found[-1][2])) if found else (0, 0, 0)


def merge(build: Path, target: str) -> int:
    """Replaces the committed corpus by the few inputs that together reach most. How many."""
    kept, least = build / "corpus" / target, build / "merged" / target
    seeds = build / "tests" / "fuzz" / "corpus" / target
    shutil.rmtree(least, ignore_errors=True)
    least.mkdir(parents=True)
    program = str(build / "tests" / "fuzz" / f"fuzz_{target}")
    subprocess.run(
        [program, "-merge=1", "-set_cover_merge=1", str(least), str(kept), str(seeds)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SMDDP_LOG_LEVEL": "error"},
    )
    files = sorted(least.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    step = max(1.0, len(files) / _MOST_FILES)
    chosen = {files[int(i * step)] for i in range(min(len(files), _MOST_FILES))}
    # Inputs that have found something have names of their own, and stay.
    named = [file for file in seeds.iterdir() if not re.match(r"[0-9a-f]{40}", file.name)]
    with zipfile.ZipFile(CORPUS / f"{target}.zip", "w", zipfile.ZIP_DEFLATED) as corpus:
        for file in sorted([*named, *chosen], key=lambda file: file.name):
            corpus.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return len(chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="the build with SMDDP_FUZZ")
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--merge", action="store_true", help="update tests/fuzz/corpus")
    parser.add_argument("targets", nargs="*", help="default: all")
    arguments = parser.parse_args()
    programs = (arguments.build / "tests" / "fuzz").glob("fuzz_*")
    targets = arguments.targets or sorted(p.name.removeprefix("fuzz_") for p in programs)
    outcomes = []
    print(HEADING, flush=True)
    try:
        for target in targets:
            outcomes.append(fuzz(arguments.build, target, arguments.seconds))
            print(outcomes[-1].row(), flush=True)
            if arguments.merge:
                print(f"{target}: {merge(arguments.build, target)} files", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 1 if any(outcome.findings for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
