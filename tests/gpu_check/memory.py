"""Memory: expandable segments, what is freed returns to the GPU, peaks beside NCCL."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist

from gpu_check import place
from gpu_check.ranks import beside_nccl, world
from gpu_check.step import Run
from harness import host_device
from harness.worker import Context

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
MIB = 1 << 20
# What a context, kernels that were loaded, and the allocator's own rounding may keep.
SLACK_MIB = 256
# NCCL's peak is what a collective needs that keeps no tensor longer than its work.
PEAK = 1.05


def expandable(run: Run) -> None:
    """Cases, memory freed and mapped again, and a tensor of more pieces than descriptors."""
    with world(run, "AA", **EXPANDABLE) as ranks:
        wanted = host_device.varied(torch.bfloat16, (0, 1, 7, 300_001, 20_000_003))
        ranks.run(host_device.check, wanted)
        run.note("cases", len(wanted))
        run.note("freed and mapped again", ranks.run(free_and_map, 12))
    size = 8 << 30
    with world(run, "AA", **EXPANDABLE, SMDDP_FALLBACK="warn") as ranks:
        run.note("256 descriptors, 8 GiB in pieces of 20 MiB", ranks.run(many_pieces, size))


def free_and_map(ctx: Context, turns: int) -> dict[str, int]:
    """Gathers in tensors of changing size, whose memory goes back to the GPU in each turn."""
    here = place.here()
    for turn in range(turns):
        numel = (1000 if here.name == "host" else 1 << 24) * (1 + turn % 3)
        part, whole = here.empty(numel), here.empty(numel * ctx.size)
        part.fill_(ctx.rank + turn)
        place.gather(whole, part).wait()
        found = whole.view(ctx.size, -1)[:, -1].tolist()
        assert found == [rank + turn for rank in range(ctx.size)], f"turn {turn}: {found}"
        del part, whole
        here.synchronize()
        dist.barrier()
        here.empty_cache()
    return {name: int(value) for name, value in host_device.imports(ctx).items()}


def many_pieces(ctx: Context, size: int) -> dict[str, int]:
    """An AllGather of ``size`` bytes with few descriptors; the paths of the calls."""
    from deepspeed_smddp.distributed import backend

    if ctx.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{ctx.rank}"  # the fallback is right, too
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    here = place.here()
    backend.reset_statistics()
    numel = size // 2 // ctx.size
    whole = here.empty(numel * ctx.size)
    part = whole[ctx.rank * numel : (ctx.rank + 1) * numel]
    part.fill_(ctx.rank + 1)
    here.synchronize()
    place.gather(whole, part).wait()
    here.synchronize()
    blocks = whole.view(ctx.size, -1)
    assert all(bool((blocks[rank] == rank + 1).all()) for rank in range(ctx.size))
    return host_device.calls(ctx, 1)


def returns(run: Run) -> None:
    """Freed memory is free for all, also where peers had it mapped; the peak is NCCL's."""
    with world(run, "AA") as ranks:
        found = ranks.run(freed_memory)
        run.note("MiB that did not return after empty_cache()", found)
        run.goal(
            f"freed memory returns up to {SLACK_MIB} MiB",
            max(found) <= SLACK_MIB,
            f"{max(found)} MiB are missing",
        )
        said = ranks.run(retry)
        run.note("retry after out of memory", said)
        refused = [text for text in said if text.startswith("out of memory")]
        run.goal("torch's retry gets the memory of its cache", not refused, said[0])
    with world(run, "AA", SMDDP_FALLBACK="warn") as ranks:
        peaks = ranks.run(peak_beside_nccl)[0]
    run.note("peak MiB of a loop of gathers", peaks)
    if isinstance(peaks.get("nccl"), float):
        ratio = peaks["smddp"] / peaks["nccl"]
        run.goal(f"peak at most {PEAK} of NCCL's", ratio <= PEAK, f"{ratio:.3f}")


def freed_memory(ctx: Context) -> int:
    """MiB of the GPU that are in use after gathers in freed tensors, and were not before."""
    free_and_map(ctx, 1)
    torch.cuda.synchronize()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    dist.barrier()
    free_and_map(ctx, 8)
    # The next call tells the peers what is gone.
    small = torch.ones(8, device="cuda")
    for _ in range(2):
        place.reduce(small).wait()
    torch.cuda.synchronize()
    time.sleep(0.5)
    dist.barrier()
    after = torch.cuda.mem_get_info()[0]
    dist.barrier()
    return max(0, (before - after) // MIB)


def retry(ctx: Context) -> str:
    """torch frees its cache when the GPU is full; what peers had mapped must be free then."""
    block = 2 << 30
    whole = torch.empty(block // 2, dtype=torch.bfloat16, device="cuda")
    part = whole.view(ctx.size, -1)[ctx.rank].fill_(ctx.rank + 1)
    place.gather(whole, part).wait()
    torch.cuda.synchronize()
    del whole, part  # in torch's cache, and mapped by the peers
    dist.barrier()
    ballast = None
    first = ctx.rank % torch.cuda.device_count() == ctx.rank  # one rank per GPU fills it
    if first:
        free = torch.cuda.mem_get_info()[0]
        ballast = torch.empty(max(0, free - (1 << 30)), dtype=torch.uint8, device="cuda")
    dist.barrier()
    said = "not tried: another rank filled this GPU"
    if first:
        # 1 GiB is free and 2 GiB are in this rank's cache: 2.5 GiB fit only if the cache is freed.
        try:
            got = torch.empty(5 * (1 << 29), dtype=torch.uint8, device="cuda")
            said = f"2.5 GiB after {torch.cuda.memory_stats()['num_alloc_retries']} retries"
            del got
        except torch.cuda.OutOfMemoryError:
            said = "out of memory: peers keep what torch has freed"
    del ballast
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    return said


def peak_beside_nccl(ctx: Context) -> dict[str, Any]:
    """The allocator's peak, in MiB, of a loop that gathers layers two ahead and frees them."""
    nccl, why = beside_nccl(ctx)
    found: dict[str, Any] = {"smddp": loop_of_gathers(ctx, None)}
    found["nccl"] = why if nccl is None else loop_of_gathers(ctx, nccl)
    return found


def loop_of_gathers(ctx: Context, group: Any) -> float:
    """Like FSDP2's forward pass: layer by layer, the next one's gather under way."""
    numel = 1 << 25
    part = torch.ones(numel // ctx.size, dtype=torch.bfloat16, device="cuda")
    for measured in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ahead: list[Any] = []
        total = torch.zeros((), device="cuda")
        for _ in range(24 if measured else 4):
            whole = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
            ahead.append((place.gather(whole, part, group), whole))
            if len(ahead) > 2:
                work, layer = ahead.pop(0)
                work.wait()
                total += layer.sum()
                del work, layer
            del whole
        for work, _layer in ahead:
            work.wait()
        del ahead
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB
