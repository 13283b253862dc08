"""The steps of ``make gpu-check`` on the device that threads simulate; its runner, bundle and page.

``make gpu-check-simulated`` runs all steps that such a device can run, in full.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
# Ranks find the functions of the steps.
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])

from gpu_check import build, catalogue, failure, order, place  # noqa: E402
from gpu_check.step import LONGEST, Run  # noqa: E402

from harness import host_device  # noqa: E402
from harness.world import Pool, World  # noqa: E402

# ---- the steps


def on_device(worlds: Pool, layout: str) -> World:
    world = worlds(layout, env={**host_device.ENVIRONMENT, "SMDDP_FALLBACK": "warn"})
    world.run(place.settle, "host")
    return world


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_operations_in_flight(worlds: Pool, layout: str) -> None:
    world = on_device(worlds, layout)
    for found in world.run(order.many, 50):
        assert 0 < found["seconds of the calls"] <= found["seconds until all were done"]
    assert min(world.run(order.mixed, 10)) > 0
    assert min(world.run(order.long_call, "reduce_scatter", 1 << 16)) > 0


def test_a_killed_rank_must_be_named(tmp_path: Path) -> None:
    step = catalogue.by_name("death")
    assert failure.one_death(Run(step, tmp_path, "host", 0), "AAA", False)


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
