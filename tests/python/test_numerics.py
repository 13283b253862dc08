"""The model of sums, which the tests of collectives compare with bit by bit."""

from __future__ import annotations

import pytest
import torch

from harness import cases, model
from harness import layout as layouts
from harness.cases import Case
from harness.layout import hosts
from harness.world import Pool

LAYOUTS = ("AAAA", "AABB", "ABBB", "ABAB", "AAABBCC", "ABCDEFGHI")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("operation", model.OPERATIONS)
@pytest.mark.parametrize("dtype", model.FLOATING, ids=name)
def test_model_agrees_with_float64(dtype: torch.dtype, operation: str) -> None:
    for layout in LAYOUTS:
        inputs = [model.data(1, rank, dtype, 500) for rank in range(len(layout))]
        for ranks in hosts(layout):
            result = model.reduced(inputs, layout, operation, ranks[0])
            assert model.near(result, inputs, operation)


def test_model_agrees_with_gloo(worlds: Pool) -> None:
    kinds = ((torch.float32, "SUM"), (torch.float64, "MAX"), (torch.int32, "PRODUCT"))
    wanted = [
        Case(collective, "base", dtype, (2500,), operation, place, seed=13)
        for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
        for dtype, operation in kinds
        for place in ("apart", "in_place")
    ]
    worlds("AAAA", "gloo").run(cases.check_all, wanted)


def test_model_does_not_round_the_sum_of_the_owning_host() -> None:
    """1 + 2^-8 is lost in bf16 when a host's sum travels, and kept on the host that owns it."""
    one = torch.tensor([1.0], dtype=torch.bfloat16)
    small = torch.tensor([2.0**-8], dtype=torch.bfloat16)
    tiny = torch.tensor([2.0**-8], dtype=torch.bfloat16)
    inputs = [one, small, tiny]
    assert model.reduced(inputs, "AAB", "SUM", 0).item() == 1 + 2.0**-7
    assert model.reduced(inputs, "AAB", "SUM", 2).item() == 1.0


def test_layout_helpers() -> None:
    assert hosts("ABAB") == [[0, 2], [1, 3]]
    assert layouts.local_rank("ABAB", 3) == 1
    assert layouts.restrict("AABB", [3, 0]) == "BA"
