"""ZeRO-3 sharded by degree trains like ZeRO-3 sharded over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.training import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300, method="signal"),
]
Result = dict[str, Any]


def carry_out(trainer: Trainer, layout: str, runs: Sequence[dict[str, Any]]) -> list[Result]:
    """The results of each run; all ranks, and so all replicas, must agree."""
    by_rank = trainer.call(
        "harness.sharding_jobs:carry_out", layout, "smddp", limit=200, runs=list(runs)
    )
    for other in by_rank[1:]:
        for mine, theirs in zip(by_rank[0]["runs"], other["runs"], strict=True):
            for key in set(mine) - {"held"}:
                assert theirs[key] == mine[key], f"ranks differ in {key}"
    results: list[Result] = by_rank[0]["runs"]
    return results


def assert_same_training(result: Result, wanted: Result) -> None:
    """Losses, gradient norms over all ranks, one gradient, and learning rates are equal."""
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert result["gradient"] == pytest.approx(wanted["gradient"], rel=1e-3, abs=1e-6)
    for key in ("rates", "skipped", "loss_scale", "world"):
        assert result[key] == wanted[key]


@pytest.mark.parametrize(("layout", "degrees"), [("AAAA", (2, 1)), ("AAABBB", (2, 3))])
def test_losses(trainer: Trainer, layout: str, degrees: tuple[int, ...]) -> None:
    runs = [{"steps": 8}, *({"steps": 8, "degree": degree} for degree in degrees)]
    wanted, *results = carry_out(trainer, layout, runs)
    assert wanted["losses"][-1] < wanted["losses"][0], "nothing was learnt"
    assert max(wanted["norms"]) > 1, "nothing was clipped"
    for degree, result in zip(degrees, results, strict=True):
        assert_same_training(result, wanted)
        assert result["held"] == pytest.approx(result["of"] / degree, rel=0.01)
        assert result["early"] == 1.0, "the replica all-reduce waited for the step"


def test_with_other_features_of_stage_3(trainer: Trainer) -> None:
    both = {
        "zero.Init, values of each rank's own, activation checkpointing": {
            "zero_init": True,
            "seed_by_rank": True,
            "checkpointing": True,
        },
        "values by Module.apply, and one parameter's from rank 3": {
            "zero_init": True,
            "seed_by_rank": True,
            "apply": True,
            "set_on": 3,
        },
        "offload to the CPU, several sub-groups": {
            "zero": {
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
                "sub_group_size": 4000,
            }
        },
        "gradients all-reduced": {"zero": {"reduce_scatter": False}},
        "no overlap": {"zero": {"overlap_comm": False}},
    }
    runs = [{"steps": 2, **run} for run in both.values()]
    results = carry_out(trainer, "AABB", runs + [{**run, "degree": 2} for run in runs])
    for name, wanted, result in zip(both, results, results[len(both) :], strict=False):
        assert "refused" not in result, (name, result)
        assert_same_training(result, wanted)
        assert result["held"] > 1.9 * wanted["held"], name
        late = "offload" in name or name == "no overlap"
        assert result["early"] == (0.0 if late else 1.0), name


def test_loss_scaling(trainer: Trainer) -> None:
    """fp16: an overflow on one rank skips the step on all ranks, and lowers the scale as usual."""
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}
    run = {"steps": 5, "micro_steps": 1, "poison": 2, "config": {"fp16": fp16}}
    wanted, result = carry_out(trainer, "AAAA", [run, {**run, "degree": 2}])
    assert wanted["skipped"] == result["skipped"] == 1
    assert result["norms"][2] == math.inf
    assert result["loss_scale"] == wanted["loss_scale"]
    assert result["rates"] == wanted["rates"]
    finite = [step for step in range(5) if step != 2]
    for key in ("losses", "norms"):
        assert [result[key][step] for step in finite] == pytest.approx(
            [wanted[key][step] for step in finite], rel=2.0**-9
        )


def test_checkpoints_at_other_degrees_and_world_sizes(trainer: Trainer, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    steps = {"steps": 4, "micro_steps": 1}
    save = {**steps, "degree": 2, "save": folder, "save_after": 2}
    resume = {**steps, "first": 2, "load": folder}
    universal = {
        **resume,
        "load": f"{folder}-universal",
        "config": {"checkpoint": {"load_universal": True}},
    }
    wanted, same, *others = carry_out(
        trainer,
        "AAAA",
        [save, *({**resume, "degree": p} for p in (2, 0)), {**universal, "degree": 1}],
    )
    files = sorted(path.name for path in (tmp_path / "saved" / "global_step2").iterdir())
    assert files == [
        f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
        for rank in (0, 1)
        for kind in ("model", "optim")
    ]
    assert same["state"] == wanted["state"], "resumed at the same degree, but the bits differ"
    others += carry_out(trainer, "AAA", [{**resume, "degree": 0}, {**universal, "degree": 1}])
    others += carry_out(trainer, "AA", [{**resume, "degree": 1}])
    for result in (same, *others):
        assert result["losses"] == pytest.approx(wanted["losses"][2:], rel=1e-6)
        assert result["norms"] == pytest.approx(wanted["norms"][2:], rel=1e-5)
        assert result["rates"] == wanted["rates"][2:]


def test_checkpoints_of_all_ranks_and_of_frozen_parameters(
    trainer: Trainer, tmp_path: Path
) -> None:
    whole, frozen = str(tmp_path / "whole"), str(tmp_path / "frozen")
    steps = {"steps": 4, "micro_steps": 1}
    first, second = carry_out(
        trainer,
        "AA",
        [
            {**steps, "save": whole, "save_after": 2},
            {**steps, "save": frozen, "save_after": 2, "frozen": True},
        ],
    )
    runs = [
        {**steps, "first": 2, "load": whole, "degree": 1},
        {**steps, "first": 2, "load": frozen, "frozen": True},
    ]
    for result, wanted in zip(carry_out(trainer, "AAA", runs), (first, second), strict=True):
        assert result["losses"] == pytest.approx(wanted["losses"][2:], rel=1e-6)


def test_refusals(trainer: Trainer) -> None:
    run = {"steps": 1, "micro_steps": 1}
    cases = [
        ({"degree": 2}, None),  # the number of ranks: nothing changes
        ({"degree": 3}, "is 3, but may hold a divisor of the 2 data-parallel ranks: 1, 2 (or 0"),
        ({"degree": 1, "zero": {"stage": 2}}, 'needs "zero_optimization.stage": 3'),
        ({"degree": 1, "zero": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"degree": 0}, None),
        # zero.Init without a config uses the setting that applies: 0, from the previous run.
        ({"degree": 1, "zero_init": "bare"}, "give zero.Init the same DeepSpeed config"),
        ({"degree": 1, "unknown": True}, "is not that of 0.19.8"),
        ({"degree": 0, "unknown": True}, None),
        ({"degree": 2, "unknown": True}, None),
    ]
    results = carry_out(trainer, "AA", [{**run, **case} for case, _ in cases])
    for (case, words), result in zip(cases, results, strict=True):
        if words is None:
            assert len(result["losses"]) == 1, case
        else:
            assert words in result["refused"]


# Each step's batch is the same 36 sequences for any number of ranks. Only the order of fp32 sums
# and the number of sequences in each rank's mean differ.
RESUMED_STEPS, TOLERANCE = 6, 1e-6


def logged(path: Path) -> dict[int, tuple[float, float]]:
    """By step: the loss and the learning rate that rank 0 logged before the end."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(step): (float(loss), float(rate)) for step, loss, rate in lines}


def test_killed_and_resumed_on_2_3_and_4_ranks(trainer: Trainer, tmp_path: Path) -> None:
    run = {"steps": RESUMED_STEPS, "micro_steps": 1, "convert": False}
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
        assert list(steps) == list(range(first, RESUMED_STEPS if killed is None else killed[1]))
        for step, (loss, rate) in steps.items():
            assert loss == pytest.approx(wanted["losses"][step], rel=TOLERANCE), (layout, step)
            assert rate == wanted["rates"][step]
    assert wanted["losses"][-1] < wanted["losses"][0], "nothing was learnt"
