"""ZeRO-3 on smddp's own paths, without copies, gives the same bits as on DeepSpeed's paths."""

from __future__ import annotations

from typing import Any

import pytest

from harness.training import Trainer
from harness.variables import debug
from harness.zero_jobs import SCENARIOS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300, method="signal"),  # at first DeepSpeed compiles an operation
]


def train(
    trainer: Trainer, layout: str, scenarios: list[str], ours: bool, **changes: Any
) -> list[dict[str, Any]]:
    return trainer.call(
        "harness.zero_jobs:run",
        layout,
        "smddp",
        limit=200,
        scenarios=scenarios,
        env=debug(zero_paths=int(ours)),
        changes=changes,
    )


def calls(result: dict[str, Any], collective: str) -> int:
    return sum(row["calls"] for row in result["statistics"] if row["collective"] == collective)


# hosts x ranks: 1x2, 3x1, 2x2
@pytest.mark.parametrize(
    ("layout", "scenarios"),
    [
        ("AA", list(SCENARIOS)),
        ("ABC", ["odd sizes", "accumulation"]),
        ("AABB", ["prefetch", "bf16"]),
    ],
    ids=["AA", "ABC", "AABB"],
)
def test_same_bits_as_deepspeeds_paths(trainer: Trainer, layout: str, scenarios: list[str]) -> None:
    ours = train(trainer, layout, scenarios, ours=True)
    theirs = train(trainer, layout, scenarios, ours=False)
    for name in scenarios:
        for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine[name]["losses"] == other[name]["losses"], f"{name}, rank {rank}"
            assert mine[name]["state"] == other[name]["state"], f"{name}, rank {rank}"
        assert ours[0][name]["losses"][-1] != ours[0][name]["losses"][0]


def test_persistent_parameters_are_gathered_at_once(trainer: Trainer) -> None:
    ours = train(trainer, "AA", ["prefetch", "persistence"], ours=True)[0]
    theirs = train(trainer, "AA", ["persistence"], ours=False)[0]
    # DeepSpeed gathers every parameter below the threshold on its own after each of four steps.
    assert calls(ours["persistence"], "all_gather") < calls(theirs["persistence"], "all_gather") / 2
    assert calls(ours["persistence"], "all_gather") < calls(ours["prefetch"], "all_gather")


def test_coalesced_accumulation_reduces_once_per_step(trainer: Trainer) -> None:
    names = ["accumulation", "coalesced accumulation"]
    every, once = (train(trainer, "AA", [name], ours=True)[0][name] for name in names)
    # Each step has three micro-steps.
    assert 0 < calls(once, "reduce_scatter") <= calls(every, "reduce_scatter") / 2
    assert once["losses"] == pytest.approx(every["losses"], rel=1e-5)


# Parameters that are gathered; that all ranks keep, so that only their gradients meet.
@pytest.mark.parametrize("kept", [0, 10_000], ids=["gathered", "reduced"])
@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_that_move_different_parameters_of_equal_sizes_are_told_so(
    trainer: Trainer, kept: int, overlap: bool
) -> None:
    zero = {"stage3_param_persistence_threshold": kept, "overlap_comm": overlap}
    results = trainer.call("harness.zero_jobs:unlike", "AA", "smddp", zero=zero)
    for result in results:
        assert "called it for other parameters of the same sizes" in result["said"], result


def test_dropped_gradients_are_named_and_offloaded_buffers_have_no_second_one(
    trainer: Trainer,
) -> None:
    for result in trainer.call("harness.zero_jobs:half_full", "AA", "smddp"):
        assert "were set to None (zero_grad) while they waited" in result["said"], result
        assert result["spare"] == [1, 0], result
