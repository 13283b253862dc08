"""Operations on CPU tensors progress while the caller computes without a call to smddp."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import model
from harness.overlap_jobs import computes_until
from harness.training import Trainer
from harness.worker import Context
from harness.world import Pool

pytestmark = [
    pytest.mark.timeout(300, method="signal"),
]
NUMEL = 300_000  # per rank: more than one round


def operations(ctx: Context) -> dict[str, tuple[Any, list[torch.Tensor], list[torch.Tensor]]]:
    """Starts each operation; returns by name the Work, its outputs and their expected values."""
    parts = [model.data(1, rank, torch.float32, NUMEL) for rank in range(ctx.size)]
    short = [part[:1001] for part in parts]
    group = dist.group.WORLD
    assert group is not None
    one = torch.empty(NUMEL * ctx.size)
    several = [torch.empty(NUMEL * ctx.size), torch.empty(1001 * ctx.size)]
    terms = torch.ones(NUMEL * ctx.size) * (ctx.rank + 1)
    total = torch.empty(NUMEL)
    sums = torch.full((NUMEL,), ctx.size * (ctx.size + 1) / 2)
    return {
        "all_gather": (
            dist.all_gather_into_tensor(one, parts[ctx.rank], async_op=True),
            [one],
            [torch.cat(parts)],
        ),
        "coalesced all_gather": (
            group.allgather_into_tensor_coalesced(several, [parts[ctx.rank], short[ctx.rank]]),
            several,
            [torch.cat(parts), torch.cat(short)],
        ),
        "coalesced reduce_scatter": (
            group.reduce_scatter_tensor_coalesced([total], [terms]),
            [total],
            [sums],
        ),
    }


def ends_while_computing(ctx: Context) -> None:
    started = operations(ctx)
    ended = threading.Event()

    def watch() -> None:
        # Only this thread uses the operations, and it only asks whether they are complete.
        while not all(work.is_completed() for work, *_ in started.values()):
            if stop.wait(0.001):
                return
        ended.set()

    stop = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert computes_until(ended.is_set), {n: w.is_completed() for n, (w, *_) in started.items()}
    finally:
        stop.set()
        watcher.join()
    for name, (_, outputs, wanted) in started.items():
        assert all(map(torch.equal, outputs, wanted)), name


@pytest.mark.parametrize("layout", ["AA", "AB", "AABB"])
def test_operations_complete_while_the_caller_computes(worlds: Pool, layout: str) -> None:
    worlds(layout).run(ends_while_computing)


# Inside a host; between hosts, and with gradients that are not copied to a contiguous buffer.
@pytest.mark.parametrize(("layout", "contiguous"), [("AA", True), ("AB", False)])
def test_zero3_computes_while_parameters_and_gradients_are_in_flight(
    trainer: Trainer, layout: str, contiguous: bool
) -> None:
    results = trainer.call("harness.overlap_jobs:run", layout, "smddp", contiguous=contiguous)
    for result in results:
        forward, backward = result["seen"]["forward"], result["seen"]["backward"]
        # The next layer's gather is in flight. The last layer's gradients come first; their bucket
        # is full when the next layer's gradients arrive.
        assert all(count > 0 for count, _ in forward[:3])
        assert [count > 0 for count, _ in backward] == [False, False, True, True], backward
        assert all(ended for _, ended in [*forward, *backward])


# Gradients of more than a MiB do not wait for their bucket, whether it holds one layer or all.
@pytest.mark.parametrize(("layout", "layers", "contiguous"), [("AA", 4, True), ("AB", 1, True)])
def test_large_gradients_are_reduced_at_once(
    trainer: Trainer, layout: str, layers: int, contiguous: bool
) -> None:
    def run(ours: bool) -> Any:
        return trainer.call(
            "harness.overlap_jobs:run",
            layout,
            "smddp",
            width=600,
            layers=layers,
            contiguous=contiguous,
            ours=ours,
        )

    results, theirs = run(True), run(False)
    for result, same in zip(results, theirs, strict=True):
        ours, without = result["seen"]["backward"], same["seen"]["backward"]
        assert [count > 0 for count, _ in ours] == [False, True, True, True], ours
        assert all(ended for _, ended in ours)
        assert not any(count for count, _ in without)
        assert result["shards"] == same["shards"], "the bits differ from those of DeepSpeed's paths"
