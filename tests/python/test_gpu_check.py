"""``make gpu-check`` on the device that threads simulate; what its bundle pins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
# Ranks find the functions of the steps.
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])

from gpu_check import build, catalogue  # noqa: E402
from gpu_check.step import LONGEST  # noqa: E402

# ---- the steps


@pytest.mark.timeout(300, method="signal")
def test_the_whole_order_on_a_simulated_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu_check", "--device", "host", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    page = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
    simulated = sum(step.simulated for step in catalogue.STEPS)
    assert f"{simulated} passed, 0 ran but missed a goal, 0 failed" in page, page


# ---- the runner


def test_steps_fit_a_call_of_ten_minutes() -> None:
    assert len({step.name for step in catalogue.STEPS}) == len(catalogue.STEPS)
    for step in catalogue.STEPS:
        assert step.limit <= LONGEST < 8 * 60
        module, name = step.function.split(":")
        __import__(f"gpu_check.{module}")
        assert callable(getattr(sys.modules[f"gpu_check.{module}"], name))


def test_the_bundle_pins_what_the_check_needs() -> None:
    lines = (ROOT / "requirements" / "gpu-check.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("_", "-").lower() for line in lines}
    for need in build.NEEDS.read_text().splitlines()[2:]:
        assert need.partition(">")[0] in pinned, need
