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


def steps_that(*functions: str, limit: int = 30, gpus: int = 1) -> list[Step]:
    """Steps of this file's ``stub_steps``, registered in the catalogue of the child too."""
    return [Step(f"stub-{f}", f"runs {f}", f"stub:{f}", limit, gpus) for f in functions]


STUB = """
import sys, time
from gpu_check import catalogue, __main__ as command
from gpu_check.step import Step
import types

stub = types.ModuleType("gpu_check.stub")
def good(run): run.note("value", 7)
def missed(run): run.goal("fast", False, "slow")
def bad(run): run.note("value", 7); raise AssertionError("a sum is wrong\\nsecond line")
def absent(run):
    from gpu_check.step import NotHereError
    raise NotHereError("there is no switch")
def slow(run): run.note("value", 7); time.sleep(60)
def dies(run): import os; os._exit(11)
for f in (good, missed, bad, absent, slow, dies): setattr(stub, f.__name__, f)
sys.modules["gpu_check.stub"] = stub
catalogue.STEPS = tuple(Step(f"stub-{n}", f"runs {n}", f"stub:{n}", 30) for n in
    ("good", "missed", "bad", "absent", "slow", "dies"))
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The children of a runner know the steps of ``STUB``; returns a folder for results."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    popen = __import__("subprocess").Popen

    def started(command: list[str], **options: Any) -> Any:
        if "gpu_check" not in command:  # git, which says what is checked
            return popen(command, **options)
        where = command.index("-m")
        return popen([*command[:where], str(script), *command[where + 2 :]], **options)

    monkeypatch.setattr("gpu_check.runner.subprocess.Popen", started)
    return tmp_path / "out"


def results(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_every_end_of_a_step_is_written_down(stubbed: Path) -> None:
    wanted = steps_that("good", "missed", "bad", "absent", "dies") + steps_that("slow", limit=3)
    assert Runner(stubbed, wanted, device="host").run() == SOMETHING_FAILED
    found = results(stubbed)
    states = {name.removeprefix("stub-"): result["status"] for name, result in found.items()}
    assert states == {
        "good": PASSED,
        "missed": MISSED,
        "bad": FAILED,
        "absent": SKIPPED,
        "dies": FAILED,
        "slow": LATE,
    }
    assert found["stub-bad"]["sentence"].startswith("a sum is wrong (")
    assert found["stub-absent"]["sentence"] == "there is no switch"
    assert "exit status 11" in found["stub-dies"]["sentence"]
    # What a step that was killed had noted is kept.
    assert found["stub-slow"]["results"] == {"value": 7}
    assert "second line" in (stubbed / "stub-bad.log").read_text()


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
    for need in build.NEEDS:
        assert need.partition(">")[0] in pinned, need
