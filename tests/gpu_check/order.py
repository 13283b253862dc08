"""What is submitted in which order: full queues, groups, graphs, few hardware queues."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from gpu_check import place
from gpu_check.ranks import first_calls, world
from gpu_check.step import Run
from harness import host_device
from harness.worker import Context

# A stream of CUDA takes about 1,000 commands; then the thread that submits blocks in the driver.
OPERATIONS = 1200
# From 680 MiB per rank on, the chunks of one call between hosts fill that queue.
LONG = 720 << 20


def queue(run: Run) -> None:
    """More operations, and longer ones, than the driver's queue takes; none may hang."""
    count = 120 if run.small else OPERATIONS
    size = 8 << 20 if run.small else LONG
    with world(run, "AA") as ranks:
        for found in ranks.run(many, 3):  # far fewer than the queue takes
            waited = found["seconds until the last wait() returned"]
            assert run.small or waited < 1, f"wait() blocked the host for {waited} s"
        run.note(f"AA: {count} calls behind a busy stream", ranks.run(many, count))
        run.note(f"AA: {count} calls of three kinds", ranks.run(mixed, count // 3))
    with world(run, "AB") as ranks:
        run.note(f"AB: {count} calls behind a busy stream", ranks.run(many, count))
        for collective in ("all_gather", "reduce_scatter"):
            seconds = max(ranks.run(long_call, collective, size))
            run.note(f"AB: {collective} of {size} bytes per rank", f"{seconds:.2f} s")


def many(ctx: Context, count: int, seconds: float = 2.0) -> dict[str, float]:
    """``count`` AllGathers, none waited for before all are called."""
    here = place.here()
    numel = 8192
    parts = [here.empty(numel) for _ in range(8)]
    wholes = [here.empty(numel * ctx.size) for _ in range(8)]
    for turn, part in enumerate(parts):
        part.fill_(ctx.rank + turn)
    for whole in wholes:
        whole.zero_()
    place.gather(wholes[0], parts[0]).wait()
    here.synchronize()
    dist.barrier()
    here.busy(seconds)
    began = time.monotonic()
    works = [place.gather(wholes[i % 8], parts[i % 8]) for i in range(count)]
    called = time.monotonic() - began
    for work in works:
        work.wait()
    waited = time.monotonic() - began
    here.synchronize()
    for turn, whole in enumerate(wholes[:count]):
        found = whole.view(ctx.size, -1)[:, -1].tolist()
        assert found == [rank + turn for rank in range(ctx.size)], f"AllGather {turn}: {found}"
    return {
        "seconds of the calls": round(called, 3),
        "seconds until the last wait() returned": round(waited, 3),
        "seconds until all were done": round(time.monotonic() - began, 3),
    }


def mixed(ctx: Context, count: int) -> float:
    """Three collectives in turn, waited for in the opposite order; seconds."""
    here = place.here()
    numel = 4096
    part, whole = here.empty(numel, torch.float32), here.empty(numel * ctx.size, torch.float32)
    summed = here.empty(numel, torch.float32)
    source = here.empty(numel * ctx.size, torch.float32)
    totals = [here.empty(100, torch.float32) for _ in range(count)]
    part.fill_(ctx.rank)
    source.fill_(ctx.rank + 1)
    for total in totals:
        total.fill_(1)
    here.synchronize()
    began = time.monotonic()
    works: list[Any] = []
    for total in totals:
        works += [place.gather(whole, part), place.scatter(summed, source), place.reduce(total)]
    for work in reversed(works):
        work.wait()
    here.synchronize()
    seconds = time.monotonic() - began
    assert summed[-1].item() == ctx.size * (ctx.size + 1) / 2
    assert all(total[-1].item() == ctx.size for total in totals)
    return round(seconds, 3)


def long_call(ctx: Context, collective: str, size: int) -> float:
    """Seconds of a call with ``size`` bytes per rank."""
    here = place.here()
    numel = size // 2
    part, whole = here.empty(numel), here.empty(numel * ctx.size)
    part.fill_(ctx.rank + 1)
    whole.fill_(ctx.rank + 1)
    here.synchronize()
    began = time.monotonic()
    if collective == "all_gather":
        place.gather(whole, part).wait()
    else:
        place.scatter(part, whole).wait()
    here.synchronize()
    seconds = time.monotonic() - began
    if collective == "all_gather":
        assert whole.view(ctx.size, -1)[:, -1].tolist() == list(range(1, ctx.size + 1))
    else:
        assert bool((part == ctx.size * (ctx.size + 1) / 2).all())
    del part, whole
    here.empty_cache()
    return seconds


def groups(run: Run) -> None:
    """Device synchronisations (cudaFree) of one rank must not lock up two groups in flight."""
    turns = 6 if run.small else 40
    for layout in ("AA", "AAAA", "AABB"):
        with world(run, layout) as ranks:
            seconds = max(ranks.run(two_groups, turns))
        run.note(f"{layout}: {turns} turns of two groups", f"{seconds:.2f} s")


def two_groups(ctx: Context, turns: int) -> float:
    """Each turn: one call in each group, on streams of their own, and freed memory on one rank."""
    here = place.here()
    pair = [dist.new_group(), dist.new_group()]
    began = time.monotonic()
    for turn in range(turns):
        numel = 1000 * (1 + turn % 5) if here.name == "host" else (1 << 20) * (1 + turn % 5)
        with here.stream():
            total = here.empty(numel, torch.float32)
            total.fill_(ctx.rank + turn)
            first = place.reduce(total, pair[0])
        if turn % ctx.size == ctx.rank:
            here.empty_cache()  # cudaFree waits for all that this rank has submitted
        with here.stream():
            part, whole = here.empty(numel), here.empty(numel * ctx.size)
            part.fill_(ctx.rank + 1)
            second = place.gather(whole, part, pair[1])
            if turn % ctx.size == ctx.size - 1 - ctx.rank:
                here.synchronize()
            second.wait()
        first.wait()
        here.synchronize()
        wanted = sum(rank + turn for rank in range(ctx.size))
        assert total[-1].item() == wanted, f"turn {turn}: {total[-1].item()}, not {wanted}"
        assert whole.view(ctx.size, -1)[:, -1].tolist() == list(range(1, ctx.size + 1))
        del total, part, whole, first, second
    return time.monotonic() - began


def graphs(run: Run) -> None:
    """All three collectives in a graph; memory that is freed during a capture; many replays."""
    for layout in ("AA", "AAAA"):
        with world(run, layout) as ranks:
            run.note(f"{layout}: microseconds of a replay", max(ranks.run(replays, 200)))
    with world(run, "AB", SMDDP_FALLBACK="warn") as ranks:
        for paths in ranks.run(recorded_between_hosts):
            assert "all_reduce fallback:nccl" in paths, paths
        run.note("AB", paths)


def replays(ctx: Context, count: int) -> float:
    """Records an AllGather, a ReduceScatter and an AllReduce; checks every 20th replay."""
    numel = 10_000
    part = torch.zeros(numel, device="cuda")
    whole = torch.zeros(numel * ctx.size, device="cuda")
    own = torch.zeros(numel, device="cuda")
    total = torch.zeros(777, device="cuda")
    for _ in range(2):  # sets the group up, and lets kernels load
        place.gather(whole, part).wait()
        place.scatter(own, whole).wait()
        place.reduce(total).wait()
    freed = torch.ones(1 << 22, device="cuda")
    place.reduce(freed).wait()  # peers have mapped it
    torch.cuda.synchronize()
    dist.barrier()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        part.add_(ctx.rank + 1)
        place.gather(whole, part).wait()
        place.scatter(own, whole).wait()
        total.copy_(own[:777])
        place.reduce(total).wait()
        del freed
    torch.cuda.synchronize()
    part.zero_()
    dist.barrier()
    began = time.monotonic()
    for turn in range(1, count + 1):
        recorded.replay()
        if turn % 20 and turn != count:
            continue
        torch.cuda.synchronize()
        assert whole.view(ctx.size, -1)[:, 7].tolist() == [
            turn * (rank + 1) for rank in range(ctx.size)
        ]
        assert own[5].item() == ctx.size * turn * (ctx.rank + 1)
        assert total[5].item() == ctx.size * turn * ctx.size * (ctx.size + 1) / 2
    return round((time.monotonic() - began) / count * 1e6, 1)


def recorded_between_hosts(ctx: Context) -> dict[str, int]:
    """NCCL, which was not connected before, carries what would pass through the CPU."""
    first_calls(ctx)
    total = torch.zeros(777, device="cuda")
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        place.reduce(total).wait()
    for turn in range(1, 20):
        total.fill_(turn)
        recorded.replay()
        torch.cuda.synchronize()
        assert total.tolist() == [float(turn * ctx.size)] * 777
    return host_device.calls(ctx, 4)


def connections(run: Run) -> None:
    """A stream that waits must not stall the compute that shares its hardware queue.

    With one queue for all streams NCCL carries.
    """
    if run.device == "cuda":
        with world(run, "AA", CUDA_DEVICE_MAX_CONNECTIONS="1", SMDDP_FALLBACK="warn") as ranks:
            paths = ranks.run(first_calls)[0]
        run.note("1 connection", paths)
        assert all(path.endswith("fallback:nccl") for path in paths), paths
    for value in ("8", "32"):
        with world(run, "AA", CUDA_DEVICE_MAX_CONNECTIONS=value) as ranks:
            ranks.run(two_groups, 4 if run.small else 15)
            found = ranks.run(beside_a_waiting_stream)
        run.note(f"{value} connections", found[0])


def beside_a_waiting_stream(ctx: Context) -> dict[str, float]:
    """Milliseconds of compute alone, and while an AllGather waits for another rank's stream."""
    here = place.here()
    part, whole = here.empty(1 << 20), here.empty(ctx.size << 20)
    part.fill_(ctx.rank + 1)
    a = here.empty(1024 * 1024 if here.name == "cuda" else 64 * 64, torch.float32).fill_(1)
    a = a.view(int(a.numel() ** 0.5), -1)

    def compute() -> float:
        passed = here.now()
        for _ in range(20):
            torch.mm(a, a)
        return round(passed() * 1e3, 3)

    place.gather(whole, part).wait()
    compute()
    here.synchronize()
    dist.barrier()
    alone = compute() if ctx.rank == 0 else 0.0
    dist.barrier()
    with here.stream():
        if ctx.rank == 1:
            here.busy(0.5)
        work = place.gather(whole, part)
    beside = compute() if ctx.rank == 0 else 0.0
    work.wait()
    here.synchronize()
    assert whole.view(ctx.size, -1)[:, -1].tolist() == list(range(1, ctx.size + 1))
    dist.barrier()
    return {"compute alone, ms": alone, "compute beside a waiting AllGather, ms": beside}
