"""FSDP2 and FSDP1 over smddp give Gloo's results, with and without smddp's own buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

import deepspeed_smddp
from deepspeed_smddp import SmddpConfigError
from deepspeed_smddp.fsdp import shared_collectives
from deepspeed_smddp.upstream import source
from harness import fsdp
from harness.fsdp import Run
from harness.variables import debug
from harness.worker import Context
from harness.world import Pool, fresh


def train(worlds: Pool, layout: str, run: Run, backend: str = "smddp") -> list[dict[str, Any]]:
    """Each rank's report; all ranks must report the same losses."""
    answers = worlds(layout, backend).run(fsdp.train, run)
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
    assert answers[0]["losses"][-1] < answers[0]["losses"][0] or run.steps < 2
    return answers


def assert_equal(got: dict[str, Any], wanted: dict[str, Any], bits: int | None = None) -> None:
    """To the bit, or, if sums run in another order, to a relative 2**-bits."""
    if bits is None:
        assert got["losses"] == wanted["losses"]
        assert got["norms"] == wanted["norms"]
        for g, w in zip(got["gradients"], wanted["gradients"], strict=True):
            assert np.array_equal(g, w)
        return
    assert got["losses"] == pytest.approx(wanted["losses"], rel=2.0**-bits)
    assert got["norms"] == pytest.approx(wanted["norms"], rel=2.0**-bits)
    for g, w in zip(got["gradients"], wanted["gradients"], strict=True):
        assert np.abs(g - w).max() <= 2.0**-bits * np.abs(w).max()


# One rank that has the whole batch.
ALONE = Run(sharding="none")


@pytest.mark.parametrize("run", [Run(enable=False), Run(), Run(prefetch=0), Run(micro_steps=2)])
@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_two_ranks_give_the_bits_of_gloo(worlds: Pool, layout: str, run: Run) -> None:
    reference = train(worlds, "AA", replace(run, enable=False), "gloo")[0]
    assert_equal(train(worlds, layout, run)[0], reference)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_bf16_gives_the_bits_of_gloo(worlds: Pool, reduce_dtype: str) -> None:
    run = Run(dtype="bfloat16", reduce_dtype=reduce_dtype)
    reference = train(worlds, "AA", replace(run, enable=False), "gloo")[0]
    assert_equal(train(worlds, "AA", run)[0], reference)


def test_gradients_divided_by_a_custom_factor(worlds: Pool) -> None:
    # Gloo has no such operation: with Gloo, FSDP2 divides after the sum.
    reference = train(worlds, "AA", Run(enable=False, divide=3.0, force_sum=True), "gloo")[0]
    assert_equal(train(worlds, "AA", Run(divide=3.0))[0], reference, bits=18)


@pytest.mark.parametrize("degree", [0, 1, 2, 4])
def test_hybrid_shard_degrees(worlds: Pool, degree: int) -> None:
    ours = train(worlds, "AABB", Run(degree=degree, micro_steps=2))[0]
    assert_equal(ours, train(worlds, "A", replace(ALONE, micro_steps=2), "gloo")[0], bits=16)
    gathered = sum(r["bytes"] for r in ours["statistics"] if r["collective"] == "all_gather")
    assert (gathered > 0) == (degree != 1)
    assert not [r for r in ours["statistics"] if r["path"].startswith("fallback")]


# With single-copy reads no byte goes through a slot.
SLOTS = {**debug(single_copy=0)}


def test_inside_a_host_a_gather_copies_each_byte_once(worlds: Pool) -> None:
    def totals(run: Run, collective: str) -> tuple[int, int]:
        answers = worlds("AA", env=SLOTS).run(fsdp.train, run)
        rows = [row for answer in answers for row in answer["statistics"]]
        rows = [row for row in rows if row["collective"] == collective]
        return sum(row["slot_bytes"] for row in rows), sum(row["bytes"] for row in rows)

    # Of the bytes that two ranks gather, half come from the peer: into a slot and out again ...
    through_slots, moved = totals(Run(enable=False), "all_gather")
    assert through_slots == moved / 2 > 1_000_000
    # ... or read in place, once.
    assert totals(Run(), "all_gather") == (0, moved)
    # The rest of a block after pieces of 32 KiB goes through a slot if it has less than 8 KiB.
    through_slots, moved = totals(Run(), "reduce_scatter")
    assert through_slots < 0.02 * moved


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_reductions_run_in_the_background_of_the_backward_pass(worlds: Pool, layout: str) -> None:
    found = worlds(layout).run(fsdp.uses_of_a_backward_pass)[0]
    assert all(same for _, same in found.values()), found
    # Four layers; if FSDP2 reads a result at once, it waits for it.
    assert {name: started for name, (started, _) in found.items()} == {
        "plain": 4,
        "existing gradients": 4,
        "a layer used twice": 4,
        "hooks of gradients": 0,
        "after a failed pass": 6,
        "sums in another type": 0,
        "copies": 0,
    }


def test_types_of_gradients_before_torch_2_15_and_since() -> None:
    one = SimpleNamespace(_orig_dtype=torch.bfloat16)
    each = [SimpleNamespace(sharded_grad_dtype=dtype) for dtype in (torch.bfloat16, None)]
    assert shared_collectives._types_of_gradients(one) == {torch.bfloat16}
    assert shared_collectives._types_of_gradients(SimpleNamespace(fsdp_params=each)) == {
        torch.bfloat16,
        None,
    }


def unknown_backward(ctx: Context) -> tuple[int, bool]:
    read = source.READ["fsdp backward"]
    read[next(iter(read))] = {}
    model = deepspeed_smddp.fsdp.enable(fully_shard(torch.nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    comm = model._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
    return comm._reductions is None, model.weight.grad is not None


def test_a_torch_with_another_backward_pass_gives_a_warning(worlds: Pool) -> None:
    with fresh("AA") as world:
        assert world.run(unknown_backward) == [(True, True)] * 2
        assert "foreach_reduce of torch" in world.log(0)


def test_checkpoints_load_at_another_world_size(worlds: Pool, tmp_path: Path) -> None:
    whole = train(worlds, "A", replace(ALONE, steps=6), "gloo")[0]["losses"]
    path = str(tmp_path / "four")
    four = train(worlds, "AABB", Run(degree=2, save=path))[0]["losses"]
    again = str(tmp_path / "two")
    two = train(worlds, "AA", Run(first=3, steps=2, load=path, save=again))[0]["losses"]
    last = Run(first=5, steps=1, load=again, enable=False)
    other = train(worlds, "AA", last, "gloo")[0]["losses"]
    assert four + two + other == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_fsdp1(worlds: Pool, layout: str) -> None:
    ours = train(worlds, layout, Run(sharding="fsdp1"))[0]
    assert_equal(ours, train(worlds, "A", ALONE, "gloo")[0] | {"gradients": []}, bits=16)
    assert not [r for r in ours["statistics"] if r["path"].startswith("fallback:") and r["bytes"]]


def mistakes(ctx: Context) -> list[str]:
    def message(call: Callable[[], object], kind: type[Exception]) -> str:
        with pytest.raises(kind) as raised:
            call()
        return str(raised.value)

    sharded = fully_shard(torch.nn.Linear(4, 4))
    return [
        message(lambda: deepspeed_smddp.fsdp.enable(torch.nn.Linear(2, 2)), ValueError),
        message(lambda: deepspeed_smddp.fsdp.enable(sharded, forward_prefetch=-1), ValueError),
        message(lambda: deepspeed_smddp.fsdp.mesh(3), SmddpConfigError),
        message(lambda: deepspeed_smddp.fsdp.mesh(-1), SmddpConfigError),
        message(lambda: deepspeed_smddp.fsdp.mesh(True), SmddpConfigError),
    ]


def test_mistakes_are_refused(worlds: Pool) -> None:
    found = worlds("AA").run(mistakes)[0]
    wanted = ["call fully_shard", "-1, but may hold 0 or more", "a divisor of the 2 ranks: 1, 2"]
    for message, part in zip(found, [*wanted, "number of ranks", "True"], strict=True):
        assert part in message


def over_gloo(ctx: Context) -> str:
    with pytest.raises(SmddpConfigError) as raised:
        deepspeed_smddp.fsdp.enable(fully_shard(torch.nn.Linear(4, 4)))
    return str(raised.value)


def test_a_model_over_another_backend_is_refused(worlds: Pool) -> None:
    assert 'init_process_group("smddp")' in worlds("AA", "gloo").run(over_gloo)[0]


def unknown_torch(ctx: Context) -> bool:
    from deepspeed_smddp.fsdp import shared_collectives

    model = fully_shard(torch.nn.Linear(4, 4))
    shared_collectives.AVAILABLE = False
    deepspeed_smddp.fsdp.enable(model)
    model(torch.ones(1, 4)).sum().backward()
    return model.weight.grad is not None


def test_a_torch_without_custom_collectives_gives_a_warning(worlds: Pool) -> None:
    with fresh("AA") as world:
        assert world.run(unknown_torch) == [True, True]
        assert "to derive from; the results are the same" in world.log(0)
