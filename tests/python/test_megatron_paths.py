"""GPT-NeoX and Megatron-DeepSpeed: their calls to set up groups and to train, in order."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from harness.training import Trainer

pytestmark = pytest.mark.timeout(400, method="signal")  # at first DeepSpeed compiles an operation

WAYS = {
    # Pipeline and model parallel sizes; at MP = 1 each rank is its own model-parallel group.
    "neox": [[1, 1], [1, 2], [2, 1], [2, 2], [4, 1]],
    # Tensor and pipeline parallel sizes.
    "megatron": [[1, 1], [2, 1], [2, 2], [1, 4]],
}
# Operations that smddp does not own and may pass to Gloo.
NOT_OURS = {"send", "recv"}


class Paths:
    """Runs the calls of ``harness.megatron``, which check their own results."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Losses do not depend on the layout: one run over Gloo is the reference for all layouts.
        self.over_gloo = functools.cache(lambda function: self.run(function, "AAAA", "gloo"))

    def run(self, function: str, layout: str, backend: str) -> list[dict[str, Any]]:
        return self._trainer.call(
            f"harness.megatron:{function}", layout, backend, limit=180, ways=WAYS[function]
        )


@pytest.fixture(scope="module")
def paths(trainer: Trainer) -> Paths:
    return Paths(trainer)


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert len(got["losses"]) > 0
    assert got["losses"] == pytest.approx(wanted["losses"], rel=2.0**-7)
    assert got["losses"][0] > got["losses"][-1], "nothing was learnt"
    assert set(got["fallback"]) <= NOT_OURS, got["fallback"]


@pytest.mark.parametrize("layout", ["AAAA", "AABB"])
@pytest.mark.parametrize("function", WAYS)
def test_path(paths: Paths, function: str, layout: str) -> None:
    wanted = paths.over_gloo(function)
    for got, reference in zip(paths.run(function, layout, "smddp"), wanted, strict=True):
        check(got, reference)
