"""A killed run resumes from its checkpoint with another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.training import Trainer
from harness.world import BACKEND

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BACKEND != "smddp", reason="DeepSpeed needs a conversion for it"),
    pytest.mark.timeout(300, method="signal"),
]
STEPS = 6
# Each step's batch is the same 36 sequences for any number of ranks. Only the order of fp32 sums
# and the number of sequences in each rank's mean differ.
TOLERANCE = 1e-6


def logged(path: Path) -> dict[int, tuple[float, float]]:
    """By step: the loss and the learning rate that rank 0 logged before the end."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(step): (float(loss), float(rate)) for step, loss, rate in lines}


def test_killed_and_resumed_on_2_3_and_4_ranks(trainer: Trainer, tmp_path: Path) -> None:
    run = {"steps": STEPS, "micro_steps": 1, "convert": False}
    job = "harness.sharding_jobs:carry_out"
    wanted = trainer.call(job, "AB", "smddp", runs=[run])[0]["runs"][0]

    # Layout, first step, step of the checkpoint, (rank to kill, step in which it is killed).
    parts = [("AB", 0, 2, (1, 3)), ("AAB", 2, 4, (2, 5)), ("AABB", 4, None, None)]
    folder = None
    for layout, first, save_after, killed in parts:
        log = tmp_path / f"{layout}.txt"
        part = {**run, "first": first, "log": str(log)}
        if folder is not None:
            part["load"] = folder
        if save_after is not None and killed is not None:
            folder = str(tmp_path / layout)
            part |= {"save": folder, "save_after": save_after, "killed": killed}
        results = trainer.attempt(job, layout, "smddp", runs=[part])
        for rank, result in enumerate(results):
            if killed is None:
                assert "error" not in result, result
            elif rank == killed[0]:
                assert result == {"error": "died"}
            else:  # the other ranks end as well, and name the killed rank
                assert f"rank {killed[0]}" in result["error"], result
        steps = logged(log)
        assert list(steps) == list(range(first, STEPS if killed is None else killed[1]))
        for step, (loss, rate) in steps.items():
            assert loss == pytest.approx(wanted["losses"][step], rel=TOLERANCE), (layout, step)
            assert rate == wanted["rates"][step]
    assert wanted["losses"][-1] < wanted["losses"][0], "nothing was learnt"
