"""Collectives on a real GPU: several ranks may share one. Skipped, with the reason, without a GPU.

``make gpu-check`` runs it. Tests that need no GPU are in ``test_device_of_threads.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import cases, host_device
from harness.cases import FORMS, MANY, Case
from harness.host_device import ON_CPU, paths, round_on_every_host
from harness.worker import Context
from harness.world import Pool, World, fresh

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda is not available"),
    pytest.mark.timeout(600, method="signal"),
    pytest.mark.xdist_group("GPU"),
]


def on_gpu(worlds: Pool, layout: str, **env: str | None) -> World:
    world = worlds(layout, env={"SMDDP_FALLBACK": "error", **env})
    world.run(host_device.use_gpu)
    return world


# SMDDP_HOST_ID defines the hosts: here ranks of two hosts share the GPU.
@pytest.mark.parametrize("layout", ["A", "AA", "AAAA", "AB", "AABB", "AAB"])
@pytest.mark.parametrize("collective", FORMS)
def test_every_form(worlds: Pool, layout: str, collective: str) -> None:
    wanted = [
        Case(collective, form, numels=(1000, 0, 1, 9457) if form in MANY else (9457,))
        for form in FORMS[collective]
    ]
    for taken in on_gpu(worlds, layout).run(host_device.check, wanted):
        assert taken == {f"{collective} {paths(layout)[collective]}": len(wanted)}


@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_sums_by_the_cpu(worlds: Pool, layout: str) -> None:
    wanted = [
        Case(collective, dtype=dtype, numels=(numel,))
        for dtype in (torch.float32, torch.bfloat16)
        for collective in ("reduce_scatter", "all_reduce")
        for numel in (0, 1, 9457, 5_000_011)
    ]
    for taken in on_gpu(worlds, layout, **ON_CPU).run(host_device.check, wanted):
        assert set(taken) == {
            f"{collective} {paths(layout, on_cpu=True)[collective]}"
            for collective in ("reduce_scatter", "all_reduce")
        }


@pytest.mark.parametrize("layout", ["AB", "AABB"])
def test_types_and_sizes_between_hosts(layout: str) -> None:
    wanted = [
        Case(collective, dtype=dtype, numels=(numel,))
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
        for collective in FORMS
        for numel in (0, 1, 7, 300_001, 6_000_003)
    ]
    wanted += [Case("all_gather", place="in_place"), Case("reduce_scatter", place="in_place")]
    with fresh(layout, env={"SMDDP_FALLBACK": "error"}) as world:
        world.run(host_device.use_gpu)
        if layout == "AABB":
            world.run(round_on_every_host)
        world.run(host_device.check, wanted)


@pytest.mark.parametrize("segments", ["False", "True"], ids=["cudaMalloc", "expandable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_types_operations_sizes_places(worlds: Pool, dtype: torch.dtype, segments: str) -> None:
    wanted = host_device.varied(dtype, (0, 1, 7, 300_001, 20_000_003))
    world = on_gpu(worlds, "AA", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{segments}")
    world.run(host_device.check, wanted)


def test_many_in_flight(worlds: Pool) -> None:
    wanted = [
        Case(collective, numels=(numel,), seed=seed)
        for seed, numel in enumerate((1, 500, 3_000_000))
        for collective in FORMS
    ]
    on_gpu(worlds, "AAA").run(cases.check_in_flight, wanted, list(range(len(wanted)))[::-1])


def busy(seconds: float) -> None:
    """Keeps the current stream busy for about ``seconds``."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def host_does_not_wait(ctx: Context) -> float:
    """Seconds that the call and wait() take while the GPU is busy for a longer time."""
    part = torch.ones(1 << 20, device="cuda")
    whole = torch.empty(ctx.size << 20, device="cuda")
    dist.all_gather_into_tensor(whole, part)
    torch.cuda.synchronize()
    dist.barrier()
    busy(2.0)
    part.mul_(3)  # the collective must run after this, and the sum below after the collective
    start = time.monotonic()
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    work.wait()
    took = time.monotonic() - start
    total = whole.sum()
    assert total.item() == 3 * whole.numel()
    return took


@pytest.mark.parametrize("layout", ["AA", "AB", "AABB"])
def test_the_host_does_not_wait_for_the_gpu(worlds: Pool, layout: str) -> None:
    assert max(on_gpu(worlds, layout).run(host_does_not_wait)) < 1.0


def graph(ctx: Context) -> None:
    part = torch.full((1000,), float(ctx.rank), device="cuda")
    whole = torch.zeros(1000 * ctx.size, device="cuda")
    total = torch.zeros(777, device="cuda")
    dist.all_gather_into_tensor(whole, part)  # sets the group up
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        part.add_(1)
        dist.all_gather_into_tensor(whole, part)
        total.add_(ctx.rank + 1)
        dist.all_reduce(total)
    total.zero_()
    wanted = 0.0
    for turn in range(1, 6):
        recorded.replay()
        torch.cuda.synchronize()
        assert whole.view(ctx.size, -1)[:, 7].tolist() == [r + turn for r in range(ctx.size)]
        wanted = wanted * ctx.size + ctx.size * (ctx.size + 1) / 2
        assert total[5].item() == wanted


def test_graphs_replay(worlds: Pool) -> None:
    on_gpu(worlds, "AA").run(graph)


def streams(ctx: Context) -> None:
    groups = [dist.new_group(), dist.new_group()]
    side = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(20):
        results = []
        for group, stream in zip(groups, side, strict=True):
            with torch.cuda.stream(stream):
                tensor = torch.full((100_000,), float(ctx.rank + turn), device="cuda")
                dist.all_reduce(tensor, group=group)
                results.append(tensor.sum())
        torch.cuda.synchronize()
        wanted = 100_000.0 * sum(rank + turn for rank in range(ctx.size))
        assert [float(result) for result in results] == [wanted, wanted]
    host = torch.ones(10)
    dist.all_reduce(host)
    assert host[0].item() == ctx.size


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_several_groups_on_several_streams(worlds: Pool, layout: str) -> None:
    on_gpu(worlds, layout).run(streams)


def graph_refused(ctx: Context) -> str:
    total = torch.zeros(777, device="cuda")
    dist.all_reduce(total)  # sets the group up
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(total)
    except ValueError as error:
        return str(error)
    return "was recorded"


def test_a_graph_does_not_record_operations_through_the_cpu() -> None:
    with fresh("AB", env={"SMDDP_FALLBACK": "error"}) as world:
        for said in world.run(graph_refused):
            assert "CUDA graph" in said


def free_and_remap(ctx: Context) -> None:
    for turn in range(6):
        numel = (1 << 20) * (1 + turn % 3)
        part = torch.full((numel,), float(ctx.rank + turn), device="cuda")
        whole = torch.empty(numel * ctx.size, device="cuda")
        dist.all_gather_into_tensor(whole, part)
        assert whole.view(ctx.size, -1)[:, -1].tolist() == [r + turn for r in range(ctx.size)]
        del part, whole
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("segments", ["False", "True"], ids=["cudaMalloc", "expandable"])
def test_memory_is_freed_and_mapped_again(worlds: Pool, segments: str) -> None:
    world = on_gpu(worlds, "AA", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{segments}")
    world.run(free_and_remap)


def ddp(ctx: Context) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = torch.nn.parallel.DistributedDataParallel(
        model.cuda(), device_ids=[torch.cuda.current_device()]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        batch = torch.randn(4 * 8, 64, generator=generator)
        mine = batch.view(ctx.size, -1, 64)[ctx.rank].cuda()
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(sum(p.double().sum() for p in model.parameters()))


def test_ddp_trains_as_with_gloo(worlds: Pool) -> None:
    # DDP broadcasts the model at the start, which smddp does not own.
    ours = on_gpu(worlds, "AA", SMDDP_FALLBACK="silent", NCCL_HOSTID=None).run(ddp_or_skip)
    if isinstance(ours[0], str):
        pytest.skip(ours[0])
    with fresh("AA", backend="gloo") as world:
        theirs = world.run(ddp)
    assert ours[0] == ours[1] == pytest.approx(theirs[0], rel=1e-4)


def ddp_or_skip(ctx: Context) -> Any:
    """NCCL, which carries DDP's broadcast, may refuse two ranks on one GPU."""
    import os

    os.environ["NCCL_HOSTID"] = f"rank{ctx.rank}"
    try:
        dist.broadcast(torch.ones(1, device="cuda"), 0)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"NCCL refuses ranks that share a GPU: {str(error)[:200]}"
    return ddp(ctx)
