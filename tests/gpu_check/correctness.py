"""Results to the bit: forms, types, misaligned addresses, more than 4 GiB."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from gpu_check import place
from gpu_check.ranks import layouts, world
from gpu_check.step import Run
from harness import host_device
from harness.cases import FORMS, MANY, Case
from harness.worker import Context
from harness.world import World

# Their outputs are torch's own tensors, which do not lie on a simulated device.
ON_GPU_ONLY = ("functional", "functional_coalesced")
MISALIGNED_BYTES = 256 << 20


def forms(run: Run) -> None:
    """Every API form of each collective, by the path that the layout is to take."""
    wanted = [
        Case(collective, form, numels=(1000, 0, 1, 9457) if form in MANY else (9457,))
        for collective, names in FORMS.items()
        for form in names
        if not (run.small and form in ON_GPU_ONLY)
    ]
    for layout in layouts(run):
        expected = {
            f"{collective} {path}": sum(case.collective == collective for case in wanted)
            for collective, path in host_device.paths(layout).items()
        }
        began = time.monotonic()
        with world(run, layout) as ranks:
            for taken in ranks.run(host_device.check, wanted):
                assert taken == expected, f"{layout} took {taken}, not {expected}"
        run.note(layout, {"calls": len(wanted), "seconds": round(time.monotonic() - began, 1)})
    with world(run, "AABB", SMDDP_REDUCE_ON="cpu") as ranks:
        sums = [case for case in wanted if case.collective != "all_gather"]
        taken = ranks.run(host_device.check, sums)[0]
        paths = host_device.paths("AABB", on_cpu=True)
        assert set(taken) == {f"{case.collective} {paths[case.collective]}" for case in sums}, taken
    run.note("AABB, sums by the CPU", {"calls": len(sums)})


def types(run: Run) -> None:
    """Types with all operations, sizes and places; inside a host, and between hosts."""
    large = 300_001 if run.small else 20_000_003
    every = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
    some = every[:2]
    for layout, dtypes in {"AA": every, "AAAA": some, "ABC": some, "AABB": some}.items():
        with world(run, layout) as ranks:
            if layout == "AABB":
                ranks.run(host_device.round_on_every_host)
            for dtype in dtypes[:2] if run.small else dtypes:
                wanted = host_device.varied(dtype, (0, 1, 7, 300_001, large))
                ranks.run(host_device.check, wanted)
                run.note(f"{layout} {str(dtype).removeprefix('torch.')}", f"{len(wanted)} calls")


def misaligned(run: Run) -> None:
    """ZeRO-3's shards begin anywhere: bits first, then what it costs."""
    with world(run, "AB") as ranks:
        check_misaligned(run, "AB", ranks)
    with world(run, "AAAA") as ranks:
        check_misaligned(run, "AAAA", ranks)
        size = 1 << 20 if run.small else MISALIGNED_BYTES
        for source, target in ((0, 0), (1, 1), (0, 1), (1, 0), (3, 5)):
            seconds = max(ranks.run(timed_sum, size, source, target))
            name = f"ReduceScatter, input {2 * source}, output {2 * target} bytes off"
            run.note(name, f"{seconds * 1e3:.3f} ms")


def check_misaligned(run: Run, layout: str, ranks: World) -> None:
    """Calls on tensors off alignment, with their results compared to the bit."""
    for dtype in (torch.bfloat16, torch.float32):
        size = dtype.itemsize
        cases = [
            replace(Case(collective, dtype=dtype, numels=(numel,)), offset=offset * size)
            for collective in ("all_gather", "reduce_scatter", "all_reduce")
            for numel in (1, 9457, 300_001)
            for offset in (1, 3, 7)
        ]
        ranks.run(host_device.check, cases)
    run.note(f"{layout}: calls with equal bits", 2 * len(cases))


def timed_sum(ctx: Context, size: int, source: int, target: int) -> float:
    """Median seconds of a ReduceScatter of ``size`` bytes of bf16, after a check of its result."""
    here = place.here()
    numel = size // 2 // ctx.size
    whole = here.empty(numel * ctx.size + source)[source:]
    part = here.empty(numel + target)[target:]
    place.ramp(whole, ctx.rank)
    here.synchronize()
    times = []
    for _ in range(7):
        passed = here.now()
        place.scatter(part, whole).wait()
        times.append(passed())
    ranks = ctx.size
    assert place.is_ramp(part, ranks, ranks * (ranks - 1) // 2, numel * ctx.rank), "wrong sum"
    return sorted(times)[len(times) // 2]


def large(run: Run) -> None:
    """Offsets and lengths above 2**32, by copy engines and kernels, and through pinned memory."""
    size = (1 << 22) + 4096 if run.small else (4 << 30) + 4096
    for layout in ("AA", "AB"):
        with world(run, layout) as ranks:
            for collective in ("all_gather", "reduce_scatter", "all_reduce"):
                seconds = max(ranks.run(one_large, collective, size, timeout=0.9 * run.step.limit))
                run.note(f"{layout} {collective} of {size} bytes", f"{seconds:.3f} s")
            if layout == "AA":
                seconds = max(
                    ranks.run(one_large, "all_gather", 2 * size, timeout=0.9 * run.step.limit)
                )
                run.note(f"{layout} all_gather of {size} bytes per rank", f"{seconds:.3f} s")


def one_large(ctx: Context, collective: str, size: int) -> float:
    """Seconds of one call on ``size`` bytes of the whole tensor, whose result is checked."""
    here = place.here()
    numel = size // 2 // ctx.size
    whole = here.empty(numel * ctx.size)
    part = here.empty(numel) if collective != "all_reduce" else whole
    ranks = ctx.size
    added = ranks * (ranks - 1) // 2
    if collective == "all_gather":
        place.ramp(part, ctx.rank)
        whole.zero_()
    else:
        place.ramp(whole, ctx.rank)
    here.synchronize()
    passed = here.now()
    if collective == "all_gather":
        place.gather(whole, part).wait()
    elif collective == "reduce_scatter":
        place.scatter(part, whole).wait()
    else:
        place.reduce(whole).wait()
    seconds = passed()
    if collective == "all_gather":
        blocks = enumerate(whole.view(ranks, -1))
        right = all(place.is_ramp(block, 1, rank) for rank, block in blocks)
    else:
        first = numel * ctx.rank if collective == "reduce_scatter" else 0
        right = place.is_ramp(part, ranks, added, first)
    assert right, f"{collective} of {size} bytes is wrong"
    del whole, part
    here.synchronize()
    here.empty_cache()
    return seconds
