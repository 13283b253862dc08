"""Ten trials of ``smddp tune --check`` between emulated hosts: the expected and the measured gain.

    python benchmarks/tune_check.py --folder runs/tune             # needs root; 15 minutes
    python benchmarks/tune_check.py --folder runs/tune --trials 3,4   # these only
    python benchmarks/tune_check.py --folder runs/tune --show      # the table of what is there

Each trial writes what ``--json`` gives; one whose file is there is not run again. Parameters are in
fp32: processors without products in bf16 take ten times as long for it. Sizes before: DeepSpeed's
own, those that transformers' Trainer fills in (from the hidden size), or DeepSpeed's own without
prefetching.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT / "build" / "torch_extensions"
HIDDEN = 512
MODEL = f"layers=4,hidden={HIDDEN},heads=8,vocabulary=256,sequence=64"
# A step that is at most so much longer counts as kept: what turns of the same sizes differ by.
KEPT = 0.02
POINTS = 0.10

BEFORE: dict[str, dict[str, int]] = {
    "DeepSpeed's defaults": {},
    "Trainer's sizes": {
        "reduce_bucket_size": HIDDEN * HIDDEN,
        "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
        "stage3_param_persistence_threshold": 10 * HIDDEN,
    },
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
}


@dataclass(frozen=True)
class Trial:
    """One run; ``released``: parameters do not stay from the forward to the backward pass."""

    hosts: int
    rate: str
    before: str
    released: bool = False

    def config(self) -> dict[str, Any]:
        zero = {"stage": 3, "overlap_comm": True, **BEFORE[self.before]}
        if self.released:
            zero |= {
                "stage3_max_reuse_distance": 0,
                "stage3_max_live_parameters": 6 * HIDDEN**2 * 4,
            }
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
        }


TRIALS = (
    Trial(2, "1gbit", "DeepSpeed's defaults"),
    Trial(2, "1gbit", "Trainer's sizes"),
    Trial(2, "1gbit", "no prefetch"),
    Trial(2, "1gbit", "Trainer's sizes", released=True),
    Trial(2, "1gbit", "no prefetch", released=True),
    Trial(3, "1gbit", "Trainer's sizes"),
    Trial(3, "1gbit", "no prefetch", released=True),
    Trial(2, "200mbit", "DeepSpeed's defaults"),
    Trial(2, "500mbit", "no prefetch", released=True),
    Trial(3, "500mbit", "Trainer's sizes"),
)


def run(trial: Trial, path: Path, turns: int, steps: int) -> None:
    """One trial; its network is measured anew, as each has a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ds.json"
        config.write_text(json.dumps(trial.config()))
        command = [sys.executable, "-m", "tests.testbed", "run", "--hosts", str(trial.hosts)]
        command += ["--rate", trial.rate, "--", "env", f"XDG_CACHE_HOME={folder}"]
        # DeepSpeed compiles its operation for CPUs once, and not below XDG_CACHE_HOME.
        command += [
            f"TORCH_EXTENSIONS_DIR={EXTENSIONS}",
            "DS_ACCELERATOR=cpu",
            sys.executable,
            "-m",
            "deepspeed_smddp.commands.main",
            "tune",
        ]
        command += ["--ds-config", str(config), "--all", "--model", MODEL, "--check"]
        command += ["--turns", str(turns), "--steps", str(steps), "--json", str(path)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{path.name}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def table(folder: Path) -> str:
    """Markdown: a row for each trial that the folder has, and how many hold."""
    rows = [
        "| trial | hosts | link | sizes before | kept between passes | ms before | ms after "
        "| gain, expected | gain, measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kept = near = count = 0
    for number, trial in enumerate(TRIALS, 1):
        path = folder / f"trial-{number}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        expected, measured = found["expected"], found["measured"]
        count += 1
        kept += measured["gain"] >= -KEPT
        near += abs(measured["gain"] - expected["gain"]) <= POINTS
        rows.append(
            f"| {number} | {trial.hosts} | {trial.rate} | {trial.before} | "
            f"{'no' if trial.released else 'yes'} | {measured['before'] * 1e3:.0f} | "
            f"{measured['after'] * 1e3:.0f} | {expected['gain']:+.1%} | {measured['gain']:+.1%} |"
        )
    rows += ["", f"Kept (at most {KEPT:.0%} longer) or better: {kept} of {count}."]
    rows += [f"Expectation within {POINTS * 100:.0f} points: {near} of {count}."]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of trial-1.json and so on")
    parser.add_argument("--trials", default="", help="numbers with commas; default: all")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = [int(n) for n in args.trials.split(",") if n] or list(range(1, len(TRIALS) + 1))
    for number in [] if args.show else chosen:
        if (args.folder / f"trial-{number}.json").exists():
            continue
        run(TRIALS[number - 1], args.folder / f"trial-{number}.json", args.turns, args.steps)
    print(table(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
