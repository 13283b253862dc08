"""The tables of docs/dev/scale.md are those of the raw data beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks/results/2026-11-25-scale"


def test_the_page_is_current() -> None:
    page = ROOT / "docs/dev/scale.md"
    before = page.read_text()
    command = [sys.executable, "benchmarks/scale.py", "--out", str(RUN), "--page", "-"]
    done = subprocess.run(
        [*command, "--tables-only"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == before
