"""Runs ``smddp_simulate``: what a collective takes on a cluster that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = Path(__file__).parents[2] / "build" / "smddp_simulate"


def simulate(hosts: int, ranks_per_host: int, *options: str) -> dict[str, Any]:
    asked = ("--hosts", str(hosts), "--ranks-per-host", str(ranks_per_host), *options)
    done = subprocess.run([COMMAND, *asked], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"smddp_simulate {' '.join(asked)}: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def sizes_option(sizes: Sequence[int]) -> tuple[str, str]:
    return ("--bytes", ",".join(str(size) for size in sizes))
