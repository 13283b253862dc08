"""DeepSpeed ZeRO-3 gives the same losses over smddp as over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from harness.training import STEPS, Trainer
from harness.world import BACKEND

pytestmark = pytest.mark.timeout(300, method="signal")  # at first DeepSpeed compiles an operation

OURS = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.fixture(scope="module")
def reference(trainer: Trainer) -> dict[int, dict[str, list[float]]]:
    """Losses over gloo, by number of ranks."""
    return {size: trainer.run("A" * size, "gloo")[0]["losses"] for size in (2, 3, 4)}


def check(results: list[dict[str, Any]], wanted: dict[str, list[float]]) -> None:
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks report different losses"
    losses = results[0]["losses"]
    assert len(losses["fp32"]) == STEPS
    assert losses["fp32"][-1] < losses["fp32"][0], "nothing was learnt"
    assert losses["fp32"] == pytest.approx(wanted["fp32"], rel=1e-6)
    assert losses["bf16"] == pytest.approx(wanted["bf16"], rel=2.0**-8)


# hosts x ranks: 1x2, 2x1, 2x2, 3x1
@pytest.mark.parametrize("layout", ["AA", "AB", "AABB", "ABC"])
def test_same_losses_as_gloo(
    trainer: Trainer, reference: dict[int, dict[str, list[float]]], layout: str
) -> None:
    results = trainer.run(layout, BACKEND)
    check(results, reference[len(layout)])
    if BACKEND == "gloo":
        return
    for result in results:
        rows = {(row["collective"], row["path"]): row for row in result["statistics"]}
        fallen = {
            key: row["bytes"]
            for key, row in rows.items()
            if key[0] in OURS and key[1].startswith("fallback") and row["bytes"]
        }
        assert not fallen, f"bytes on the fallback: {fallen}"
        for name in OURS:
            carried = sum(
                row["bytes"] for (collective, _), row in rows.items() if collective == name
            )
            assert carried > 0, f"{name} was never called: {sorted(rows)}"
