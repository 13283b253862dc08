"""The steps of ``make gpu-check`` on the device that threads simulate; its runner, bundle and page.

``make gpu-check-simulated`` runs all steps that such a device can run, in full.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
# Ranks find the functions of the steps.
os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])

from gpu_check import build, catalogue, correctness, failure, order, place  # noqa: E402
from gpu_check.runner import SOMETHING_FAILED, Runner  # noqa: E402
from gpu_check.step import FAILED, LATE, LONGEST, MISSED, PASSED, SKIPPED, Run, Step  # noqa: E402

from harness import host_device  # noqa: E402
from harness.world import Pool, World, WorldError  # noqa: E402

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


def one_large_with_a_wrong_byte(ctx: Any, collective: str) -> None:
    """As ``one_large``, but a byte of the result is wrong before it is looked at."""
    exact = place.is_ramp

    def looked_at(tensor: Any, *rest: int) -> bool:
        if ctx.rank == 1:
            tensor[tensor.numel() // 2] += 1
        return exact(tensor, *rest)

    place.is_ramp = looked_at
    try:
        correctness.one_large(ctx, collective, 1 << 20)
    finally:
        place.is_ramp = exact


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_wrong_element_of_a_large_result_is_noticed(worlds: Pool, collective: str) -> None:
    world = on_device(worlds, "AA")
    world.run(correctness.one_large, collective, 1 << 20)
    with pytest.raises(WorldError, match="is wrong") as raised:
        world.run(one_large_with_a_wrong_byte, collective)
    assert set(raised.value.failures) == {1}


def test_a_killed_rank_must_be_named(tmp_path: Path) -> None:
    step = catalogue.by_name("death")
    assert failure.one_death(Run(step, tmp_path, "host", 0), "AAA", False)


# ---- the runner


def test_every_end_of_a_step_is_written_down(tmp_path: Path) -> None:
    wanted = {"missed": MISSED, "bad": FAILED, "absent": SKIPPED, "dies": FAILED, "slow": LATE}
    steps = [Step("good", "", "stubs:good", 30, arguments=(7,))]
    steps += [Step(name, "", f"stubs:{name}", 3 if name == "slow" else 30) for name in wanted]
    assert Runner(tmp_path, steps, device="host").run() == SOMETHING_FAILED
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {n: r["status"] for n, r in found.items()} == {"good": PASSED, **wanted}
    assert found["bad"]["sentence"].startswith("a sum is wrong (")
    assert found["absent"]["sentence"] == "there is no switch"
    assert "exit status 11" in found["dies"]["sentence"]
    # What a step that was killed had noted is kept.
    assert found["good"]["results"] == found["slow"]["results"] == {"value": 7}
    assert "second line" in (tmp_path / "bad.log").read_text()


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
