"""GPT-NeoX and Megatron-DeepSpeed: the calls with which they set up groups and train, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.training import Trainer

pytestmark = pytest.mark.timeout(400, method="signal")  # the first compiles an op of DeepSpeed

# What smddp does not own, and may hand to Gloo.
NOT_OURS = {"broadcast", "send", "recv", "gather", "all_to_all", "scatter", "reduce"}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    served = Trainer()
    yield served
    served.close()


def compare(trainer: Trainer, function: str, layout: str, ways: list[list[int]]) -> None:
    """The same calls over Gloo and over smddp; every result is checked by the calls themselves."""
    wanted = trainer.call(f"harness.megatron:{function}", layout, "gloo", ways=ways)
    results = trainer.call(f"harness.megatron:{function}", layout, "smddp", ways=ways)
    for got, reference in zip(results, wanted, strict=True):
        check(got, reference)


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert len(got["losses"]) > 0
    assert got["losses"] == pytest.approx(wanted["losses"], rel=2.0**-7)
    assert got["losses"][0] > got["losses"][2], "nothing was learnt"
    assert set(got["fallback"]) <= NOT_OURS, got["fallback"]


# Pipeline and model parallel sizes; at MP = 1 each rank's model-parallel group is the rank alone.
@pytest.mark.parametrize("layout", ["AAAA", "AABB"])
def test_gpt_neox(trainer: Trainer, layout: str) -> None:
    compare(trainer, "neox", layout, [[1, 1], [1, 2], [2, 1], [2, 2], [4, 1]])


# Tensor and pipeline parallel sizes.
@pytest.mark.parametrize("layout", ["AAAA", "AABB"])
def test_megatron_deepspeed(trainer: Trainer, layout: str) -> None:
    compare(trainer, "megatron", layout, [[1, 1], [2, 1], [2, 2], [1, 4]])
