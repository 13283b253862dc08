"""Sums bit by bit: order, rounding, special values, and the reductions of the fallback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import cases, model
from harness.cases import Case
from harness.layout import hosts
from harness.worker import Context
from harness.world import BACKEND, Pool

gloo_only_covers = pytest.mark.skipif(
    BACKEND == "gloo", reason="development run on gloo, which does not have this"
)
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


def test_model_does_not_round_the_sum_of_the_owning_host() -> None:
    """1 + 2^-8 is lost in bf16 when a host's sum travels, and kept on the host that owns it."""
    one = torch.tensor([1.0], dtype=torch.bfloat16)
    small = torch.tensor([2.0**-8], dtype=torch.bfloat16)
    tiny = torch.tensor([2.0**-8], dtype=torch.bfloat16)
    inputs = [one, small, tiny]
    assert model.reduced(inputs, "AAB", "SUM", 0).item() == 1 + 2.0**-7
    assert model.reduced(inputs, "AAB", "SUM", 2).item() == 1.0


def repeated(ctx: Context, case: Case, times: int) -> set[str]:
    return {cases.check(ctx, case) for _ in range(times)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", model.FLOATING, ids=name)
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_sums_are_exact_and_equal_in_every_run(
    worlds: Pool, layout: str, collective: str, dtype: torch.dtype
) -> None:
    """``check`` compares each result with the model; this compares runs and ranks, bit by bit."""
    for numel in (5000, 90_001):
        digests = worlds(layout).run(
            repeated, Case(collective, "base", dtype, (numel,), seed=numel), times=4
        )
        assert all(len(found) == 1 for found in digests), "runs differ"
        if collective == "all_reduce":
            assert len(set().union(*digests)) == 1, "ranks differ"


def special_values(ctx: Context) -> None:
    """Infinity stays, opposite infinities and NaN give NaN, fp16 overflows only in the result."""
    inf, nan = float("inf"), float("nan")
    for dtype in model.FLOATING:
        t = torch.tensor([inf, inf if ctx.rank == 0 else -inf, 1.0, 0.0, -0.0], dtype=dtype)
        if ctx.rank == ctx.size - 1:
            t[2] = nan
        dist.all_reduce(t)
        assert t[0] == inf and t[1].isnan() and t[2].isnan() and t[3] == 0, (dtype, t)
        for operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            t = torch.tensor([inf, -inf, float(ctx.rank)], dtype=dtype)
            dist.all_reduce(t, op=operation)
            last = 0.0 if operation == dist.ReduceOp.MIN else ctx.size - 1.0
            assert t.tolist() == [inf, -inf, last], (dtype, t)


@pytest.mark.parametrize("layout", ["AAA", "AABB"])
def test_infinity_and_nan(worlds: Pool, layout: str) -> None:
    worlds(layout).run(special_values)


def fp16_near_overflow(ctx: Context) -> None:
    """60000 - 60000 + 60000 ...: every prefix sum of two would overflow if kept in fp16."""
    sign = (1, 1, -1, -1)[ctx.rank % 4]
    t = torch.full((100,), 60000.0 * sign, dtype=torch.float16)
    dist.all_reduce(t)
    assert torch.equal(t, torch.zeros(100, dtype=torch.float16)), t[0]


@gloo_only_covers
def test_fp16_is_summed_in_fp32_within_a_host(worlds: Pool) -> None:
    worlds("AAAA").run(fp16_near_overflow)


UNSUPPORTED = ("BAND", "BOR", "BXOR", "PREMUL_SUM")


def unusual_reduction(ctx: Context, operation: str) -> str:
    """The right result by the fallback, or a refusal that names the operation."""
    t = torch.tensor([1 << ctx.rank, 0b111, 5], dtype=torch.int32)
    op = (
        torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
        if operation == "PREMUL_SUM"
        else getattr(dist.ReduceOp, operation)
    )
    if operation == "PREMUL_SUM":
        t = t.float()
    try:
        dist.all_reduce(t, op=op)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error).upper().replace("_", "").replace(" ", "")
        assert operation.replace("_", "") in text or "REDUCEOP" in text, error
        return "refused"
    every = (1 << ctx.size) - 1
    wanted = {
        "BAND": [0 if ctx.size > 1 else 1, 7, 5],
        "BOR": [every, 7, 5],
        "BXOR": [every, 7 * (ctx.size % 2), 5 * (ctx.size % 2)],
        "PREMUL_SUM": [2.0 * every, 14.0 * ctx.size, 10.0 * ctx.size],
    }[operation]
    assert t.tolist() == wanted
    return "right"


@pytest.mark.parametrize("operation", UNSUPPORTED)
@pytest.mark.parametrize("layout", ["AAA", "AABB"])
def test_other_reductions_work_or_are_refused(worlds: Pool, layout: str, operation: str) -> None:
    outcomes = set(worlds(layout).run(unusual_reduction, operation))
    assert len(outcomes) == 1
    if operation.startswith("B"):
        assert outcomes == {"right"}, "gloo has the bitwise reductions, so the fallback has them"


def complex_sum(ctx: Context) -> None:
    t = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (ctx.rank + 1)
    dist.all_reduce(t)
    factor = ctx.size * (ctx.size + 1) / 2
    assert torch.equal(t, torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * factor)


def test_complex_all_reduce(worlds: Pool) -> None:
    worlds("AAB").run(complex_sum)


def bool_any(ctx: Context) -> None:
    for operation, wanted in ((dist.ReduceOp.MAX, True), (dist.ReduceOp.MIN, False)):
        t = torch.tensor([ctx.rank == 0, True, False])
        dist.all_reduce(t, op=operation)
        assert t.tolist() == [wanted, True, False], (operation, t)


@gloo_only_covers
def test_bool_all_reduce(worlds: Pool) -> None:
    worlds("AAB").run(bool_any)
