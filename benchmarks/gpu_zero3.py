"""The ZeRO-3 demo on the GPUs of one machine: the losses over smddp beside those over NCCL.

    python benchmarks/gpu_zero3.py --out runs/gpu

It runs the same program with the same seed twice, the second time with SMDDP_DEVICE=off, which
leaves CUDA tensors to NCCL. It fails if a loss differs by more than rounding to bf16 explains. It
writes both curves.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TRAIN = 'exec python -u examples/train.py "$@"'
# Ranks that share GPU 0: the device of each rank is number 0, and NCCL takes the ranks for separate
# hosts.
SHARED = "export NCCL_HOSTID=rank$LOCAL_RANK LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=0; "
TOLERANCE = 0.02  # relative, of a loss; both runs round to bf16 in each step


def losses(name: str, arguments: argparse.Namespace, directory: Path) -> list[float]:
    """Trains once and returns the loss of every step."""
    output = directory / name
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    environment["SMDDP_DEVICE"] = "off" if name == "nccl" else "auto"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    shared = SHARED if arguments.ranks > torch.cuda.device_count() else ""
    command += [str(arguments.ranks), "--no-python", "bash", "-c", shared + TRAIN, "train"]
    section = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    section["smddp"]["routes"] = dict.fromkeys(kinds, "smddp")
    (directory / "config.json").write_text(json.dumps(section))
    command += [
        "--deepspeed_config",
        str(directory / "config.json"),
        "--steps",
        str(arguments.steps),
        "--output",
        str(output),
        "--no-progress",
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)
    with (output / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda is not available; nothing was trained", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = (losses(name, arguments, Path(directory)) for name in ("smddp", "nccl"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"zero3-{arguments.ranks}-ranks.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "smddp", "nccl"])
        writer.writerows((i + 1, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(ours)} steps, largest difference of a loss {worst:.2%}; written: {path}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
