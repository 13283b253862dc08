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
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_LARGEST_INPUT = 4096  # bytes
_LONGEST_INPUT = 20  # seconds
_MOST_MEMORY = 2048  # MiB
# Files that --merge keeps of a target.
_MOST_FILES = 40
_STATE = re.compile(rb"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", re.MULTILINE)


# Of a target: inputs run, edges and features covered, files of its corpus.
_COLUMNS = ("target", "seconds", "runs", "edges", "features", "corpus", "findings")
_ROW = "{:<14} {:>7} {:>11} {:>7} {:>9} {:>7} {:>9}"


def fuzz(build: Path, target: str, seconds: int) -> bool:
    """Runs one target for some seconds, or until it finds something; whether it did."""
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
    took = time.monotonic() - begin
    found = ended.returncode != 0
    runs, edges, features = [(0, 0, 0), *_STATE.findall(log.read_bytes())][-1]
    counts = (round(took), int(runs), int(edges), int(features), len(list(kept.iterdir())))
    print(_ROW.format(target, *(f"{count:,}" for count in counts), int(found)), flush=True)
    if found:
        print(f"{target} has found something: see {findings} and {log}", file=sys.stderr)
    return found


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
    found = False
    print(_ROW.format(*_COLUMNS), flush=True)
    try:
        for target in targets:
            found |= fuzz(arguments.build, target, arguments.seconds)
            if arguments.merge:
                print(f"{target}: {merge(arguments.build, target)} files", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
