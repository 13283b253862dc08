"""What a call costs, and how fast bytes move."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gpu_check import build, place
from gpu_check.machine import ROOT
from gpu_check.ranks import beside_nccl, first_calls, world
from gpu_check.step import NotHereError, Run
from harness.worker import Context

GIB = 1 << 30
OF_COPY = 0.85  # of the copy ceiling, for an AllGather of 1 GiB
SLOWDOWN = 0.01  # of a matmul beside an AllGather, more than beside copies of as many bytes
TABLE_ROWS = ("smddp_busbw_GBps", "copy_busbw_GBps", "nccl_busbw_GBps", "of_copy")


def calls(run: Run) -> None:
    """Host microseconds of a call and its wait(), and calls back to back."""
    for layout in ("AA", "AAAA", "AB", "AABB"):
        # Ranks that share a GPU take turns on it, milliseconds each.
        count = 20 if run.small else 500 if len(layout) <= run.gpus else 100
        with world(run, layout, SMDDP_FALLBACK="warn") as ranks:
            found = ranks.run(cost, count)[0]
        run.note(f"{layout}: microseconds", found)


def cost(ctx: Context, count: int) -> dict[str, Any]:
    """Microseconds on the host and from first call to last end; smddp's, and NCCL's if it works."""
    nccl, why = beside_nccl(ctx)
    found: dict[str, Any] = {"smddp": cost_in(ctx, None, count)}
    found["nccl"] = why if nccl is None else cost_in(ctx, nccl, count)
    return found


def cost_in(ctx: Context, group: Any, count: int) -> dict[str, float]:
    """For an AllGather of 64 KiB per rank and an AllReduce of 64 KiB."""
    here = place.here()
    part, whole = here.empty(1 << 15), here.empty(ctx.size << 15)
    part.fill_(ctx.rank + 1)
    found = {}
    kinds = {
        "all_gather": lambda: place.gather(whole, part, group),
        "all_reduce": lambda: place.reduce(part, group),
    }
    for name, begin in kinds.items():
        for _ in range(5):
            begin().wait()
        here.synchronize()
        dist.barrier()
        called = waited = 0.0
        for _ in range(count // 5):
            start = time.perf_counter()
            work = begin()
            between = time.perf_counter()
            work.wait()
            called += between - start
            waited += time.perf_counter() - between
            here.synchronize()
        dist.barrier()
        start = time.perf_counter()
        works = [begin() for _ in range(count)]
        for work in works:
            work.wait()
        here.synchronize()
        rate = (time.perf_counter() - start) / count
        turns = count // 5
        found[f"{name} call"] = round(called / turns * 1e6, 1)
        found[f"{name} wait"] = round(waited / turns * 1e6, 1)
        found[f"{name} back to back"] = round(rate * 1e6, 1)
    return found


def routes(run: Run) -> None:
    """What a user's first calls measure, and what that chooses; the next job recalls it."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TEST_SECTION": None, "XDG_CACHE_HOME": cache}
        for turn in ("measured", "recalled"):
            with world(run, "AA", **variables) as ranks:
                run.note(f"paths, {turn}", ranks.run(first_calls)[0])
                said = [line for line in ranks.log(0).splitlines() if " on cuda, " in line]
            run.note(turn, said)
            assert len(said) == 3 and all(f", {turn} in " in line for line in said), said


def kernels(run: Run, name: str) -> None:
    """Kernels alone: whether they make the CPU's bytes, and GB/s by the number of thread blocks."""
    program = build.BENCHMARKS / f"{name}_gpu_benchmark"
    if not program.exists():
        raise NotHereError(f"{program.name} was not built: nvcc is not there")
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    assert done.returncode == 0, f"{program.name} ended with exit status {done.returncode}"
    said, *table = done.stdout.splitlines()
    run.note("bytes", said)
    head, *rows = (line.split() for line in table)
    for row in rows:
        cells = list(zip(head, row, strict=True))
        rates = head.index("blocks") + 1  # the first column of rates
        key = ", ".join(f"{name} {value}" for name, value in cells[:rates])
        run.note(f"{key}, GB/s", dict(cells[rates:]))


def bandwidth(run: Run, ranks: int = 0, *more: str) -> None:
    """``benchmarks/gpu.py``, by default with a rank per GPU.

    Its page and raw data lie beside the step's result. Hosts are ranks over loopback, through
    pinned memory.
    """
    ranks = ranks or run.gpus
    folder = run.folder / run.step.name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--ranks", str(ranks)]
    command += ["--out", str(folder), *more]
    if ranks > run.gpus or "--hosts" in more:  # NCCL would use sockets
        command += ["--no-nccl", "--largest", str(GIB)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows, beside = read_tables(folder)
    for row in rows:
        figures = {name: round(float(row[name]), 2) for name in TABLE_ROWS if row.get(name)}
        run.note(f"{row['op']} of {row['bytes']} bytes, busbw in GB/s", figures)
    for row in beside:
        run.note(f"{row['op']} beside a matmul", row)
    judge(run, rows, beside, "--hosts" not in more)


def read_tables(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows of calls, and those beside a matmul, that ``benchmarks/gpu.py`` wrote."""
    tables: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            tables[path.stem.endswith("beside-matmul")].extend(csv.DictReader(file))
    return tables


def judge(
    run: Run, rows: list[dict[str, str]], beside: list[dict[str, str]], in_host: bool
) -> None:
    """The goals: only for AllGather inside a host, where no network limits it."""
    if not in_host:
        return
    gathers = [r for r in rows if r["op"] == "all_gather" and int(r["bytes"]) == GIB]
    for row in gathers:
        of_copy = float(row["of_copy"])
        said = f"{of_copy:.2f}"
        run.goal(f"AllGather of 1 GiB at {OF_COPY} of a plain copy", of_copy >= OF_COPY, said)
    if not gathers:
        run.goal(f"AllGather of 1 GiB at {OF_COPY} of a plain copy", False, "not measured")
    for row in beside:
        if row["op"] == "all_gather":
            slower, copies = float(row["smddp"]), float(row["copy"])
            name = f"a matmul beside AllGathers slows down as beside copies, or {SLOWDOWN:.0%} more"
            run.goal(name, slower <= copies + SLOWDOWN, f"{slower:.1%}, beside copies {copies:.1%}")
            run.note("kernels that the profiler saw in an AllGather", row["kernels"])
