"""GPU collectives of the ranks of one machine: smddp beside a plain copy and NCCL, in one run.

    python benchmarks/gpu.py --ranks 2 --out runs/gpu

Ranks have a GPU each, or share GPUs if there are more ranks than GPUs.

For each size and collective it times, in turns: smddp; a plain device-to-device copy of as many
bytes as the collective has to write (the ceiling; the ranks share the GPU there as well); and NCCL
if it can run. Every result is checked before it is timed. Then it measures how much a bf16 matmul
slows down while a collective runs, and while those plain copies run, and lists the kernels that the
profiler sees in the collective: a collective without kernels takes no multiprocessor. It writes a
CSV file and a page into the folder of the run.

With ``--hosts`` the ranks count as several hosts (SMDDP_HOST_ID). Bytes between these hosts go
through pinned memory and libfabric, over the loopback of this machine. Such a run shows that this
way works, what it costs the host, and what it takes of the GPU; it does not show the speed of a
network.

busbw, as in nccl-tests: bytes of the whole tensor * (n - 1) / n / time; for AllReduce twice that.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shared.build import imported_tree
from shared.page import Origin, write_page
from shared.provenance import machine, source_version

import deepspeed_smddp

OPS = ("all_gather", "reduce_scatter", "all_reduce")
FACTOR = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


class Case:
    """Buffers of one collective; ``size`` is the bytes of the whole tensor."""

    def __init__(self, op: str, size: int, rank: int, ranks: int) -> None:
        count = size // 2 // ranks
        self.op, self.rank, self.ranks = op, rank, ranks
        self.part = torch.empty(count, dtype=torch.bfloat16, device="cuda")
        self.whole = torch.empty(count * ranks, dtype=torch.bfloat16, device="cuda")
        self.size = self.whole.nbytes

    def fill(self) -> None:
        self.part.fill_(self.rank + 1)
        self.whole.fill_(0 if self.op == "all_gather" else self.rank + 1)

    def call(self, group: Any) -> Any:
        if self.op == "all_gather":
            return dist.all_gather_into_tensor(self.whole, self.part, group=group, async_op=True)
        if self.op == "reduce_scatter":
            return dist.reduce_scatter_tensor(self.part, self.whole, group=group, async_op=True)
        return dist.all_reduce(self.whole, group=group, async_op=True)

    def copy(self) -> None:
        """Plain copies of the least bytes that the collective has to write."""
        if self.op == "reduce_scatter":
            self.part.copy_(self.whole[: self.part.numel()])
            return
        for block in self.whole.view(self.ranks, -1):
            block.copy_(self.part)

    def right(self) -> bool:
        if self.op == "all_gather":
            wanted = torch.arange(1, self.ranks + 1, device="cuda", dtype=torch.bfloat16)
            return bool((self.whole.view(self.ranks, -1) == wanted[:, None]).all())
        total = self.ranks * (self.ranks + 1) / 2
        return bool(((self.part if self.op == "reduce_scatter" else self.whole) == total).all())


def timed(call: Callable[[], Any], least: int = 5, seconds: float = 0.3) -> float:
    """Median seconds of one call, by the clock of the GPU."""
    times: list[float] = []
    spent = 0.0
    while len(times) < least or (spent < seconds and len(times) < 200):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work = call()
        if work is not None:
            work.wait()
        end.record()
        end.synchronize()
        took = torch.tensor([begin.elapsed_time(end) / 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)  # on the CPU, so that all ranks stop together
        times.append(float(took))
        spent += float(took)
    return statistics.median(times)


def matmul_slowdown(call: Callable[[], Any]) -> float:
    """How much longer bf16 matmuls take while eight of ``call`` run, as a ratio minus 1."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def multiply(beside: bool) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        works = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            works = [call() for _ in range(8)] if beside else []
        begin.record()
        for _ in range(40):
            torch.mm(a, a)
        end.record()
        end.synchronize()
        for work in filter(None, works):
            work.wait()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    multiply(True)
    alone = statistics.median(multiply(False) for _ in range(5))
    return statistics.median(multiply(True) for _ in range(5)) / alone - 1


def nccl_group(rank: int) -> tuple[Any, str]:
    """A group over NCCL, or why not. It takes ranks that share a GPU for separate hosts."""
    try:
        group = dist.new_group(backend="nccl")
        dist.all_reduce(torch.ones(8, device="cuda"), group=group)
        torch.cuda.synchronize()
        return group, ""
    except Exception as error:  # what NCCL raises depends on its version
        return None, str(error).splitlines()[0][:200]


def kernels_during(case: Case, group: Any) -> list[str]:
    """Names of kernels that the profiler sees while the collective runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        case.call(group).wait()
        torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages()}
    return sorted(name for name in names if not name.startswith(("Memcpy", "Memset", "cu")))


def rank_main(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    gpu = rank % torch.cuda.device_count()
    os.environ.update(LOCAL_RANK=str(gpu), NCCL_DEBUG="ERROR")
    if arguments.ranks > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("SMDDP_FALLBACK", "error")
    if arguments.hosts > 1:
        os.environ["SMDDP_HOST_ID"] = f"host{rank * arguments.hosts // arguments.ranks}"
        os.environ.setdefault("SMDDP_FABRIC_INTERFACE", "lo")
    torch.cuda.set_device(gpu)
    deepspeed_smddp.configure(routes=dict.fromkeys(OPS, "smddp"))
    dist.init_process_group(
        "smddp", init_method=f"file://{arguments.rendezvous}", rank=rank, world_size=arguments.ranks
    )
    nccl, why_no_nccl = nccl_group(rank) if arguments.nccl else (None, "not asked for")
    rows = [
        row for op in OPS for row in measure_sizes(op, arguments.sizes, rank, arguments.ranks, nccl)
    ]
    beside = [measure_beside_matmul(op, arguments, rank, nccl) for op in OPS]
    if rank == 0:
        results.put((rows, beside, why_no_nccl))
    dist.barrier()
    dist.destroy_process_group()


def measure_sizes(
    op: str, sizes: Sequence[int], rank: int, ranks: int, nccl: Any
) -> Iterator[dict[str, Any]]:
    """A row for each size that fits into the GPU's memory on all ranks."""
    for size in sizes:
        case = allocate(op, size, rank, ranks)
        if case is None:
            return
        yield measure(case, nccl)
        del case
        torch.cuda.empty_cache()


def allocate(op: str, size: int, rank: int, ranks: int) -> Case | None:
    """The buffers, or None if they do not fit on some rank."""
    case: Case | None = None
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        case = Case(op, size, rank, ranks)
    fits = torch.tensor([0.0 if case is None else 1.0])
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return case if fits else None


def measure(case: Case, nccl: Any) -> dict[str, Any]:
    """smddp, the copy and NCCL: each result is checked before it is timed."""
    row: dict[str, Any] = {"op": case.op, "bytes": case.size, "ranks": case.ranks}
    calls: dict[str, Callable[[], Any]] = {"smddp": lambda: case.call(None), "copy": case.copy}
    if nccl is not None:
        calls["nccl"] = lambda: case.call(nccl)
    for name, call in calls.items():
        case.fill()
        work = call()
        if work is not None:
            work.wait()
            if not case.right():
                raise SystemExit(f"{name}: {case.op} of {case.size} bytes is wrong")
        row[f"{name}_seconds"] = timed(call)
    busy = case.size * FACTOR[case.op] * (case.ranks - 1) / case.ranks
    for name in calls:
        row[f"{name}_busbw_GBps"] = busy / row[f"{name}_seconds"] / 1e9
    row["of_copy"] = row["copy_seconds"] / row["smddp_seconds"]
    return row


def measure_beside_matmul(
    op: str, arguments: argparse.Namespace, rank: int, nccl: Any
) -> dict[str, Any]:
    """The kernels of the collective, and the slowdown of a matmul that runs at the same time."""
    case = Case(op, arguments.overlap, rank, arguments.ranks)
    case.fill()
    found: dict[str, Any] = {"op": op}
    found["kernels"] = ", ".join(kernels_during(case, None)) or "none"
    found["smddp"] = matmul_slowdown(lambda: case.call(None))
    found["copy"] = matmul_slowdown(case.copy)
    if nccl is not None:
        found["nccl"] = matmul_slowdown(lambda: case.call(nccl))
    return found


def report(
    rows: list[dict[str, Any]], beside: list[dict[str, Any]], why: str, out: Path, hosts: int
) -> None:
    """Writes the CSV file and a page into the folder ``out``, and prints the tables."""
    ranks = rows[0]["ranks"]
    name = f"{ranks}-ranks" + (f"-{hosts}-hosts" if hosts > 1 else "")
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / f"{name}.csv", rows)
    write_rows(out / f"{name}-beside-matmul.csv", beside)
    count = min(ranks, torch.cuda.device_count())
    gpu = f"{count} x {torch.cuda.get_device_name(0)}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if not why else f"none ({why})"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    origin = Origin(f"{machine()}; {gpu}", versions, source_version(imported_tree()))
    title = f"{ranks} ranks on {gpu}"
    title += f", as {hosts} hosts over loopback" if hosts > 1 else ""
    text = "\n".join(tables(rows, beside))
    path = write_page(out, name, title, origin, text, figure=False)
    print(f"{title}\n{versions}\n\n{text}")
    print(f"\nwritten: {out / name}.csv and {path}")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a CSV file whose columns are the keys of all rows."""
    fields = sorted({key for row in rows for key in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


def tables(rows: list[dict[str, Any]], beside: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "Median times, bf16; busbw in GB/s; every result was checked.",
        "",
        "| collective | bytes | smddp | copy | NCCL | smddp / copy |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [row.get(f"{name}_busbw_GBps") for name in ("smddp", "copy", "nccl")]
        cells = " | ".join("" if f is None else f"{f:.1f}" for f in figures)
        lines.append(f"| {row['op']} | {row['bytes']} | {cells} | {row['of_copy']:.2f} |")
    slowdowns = ("smddp", "copy", "nccl")
    lines += ["", "| beside a bf16 matmul | kernels of smddp | slowdown with smddp | copy | NCCL |"]
    lines += ["|---|---|---|---|---|"]
    for row in beside:
        cells = " | ".join(f"{row[name]:.1%}" if name in row else "" for name in slowdowns)
        lines.append(f"| {row['op']} | {row['kernels']} | {cells} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--hosts", type=int, default=1, help="number of hosts over which the ranks are divided"
    )
    parser.add_argument(
        "--largest", type=int, default=4 << 30, help="largest size: bytes of the whole tensor"
    )
    parser.add_argument(
        "--overlap", type=int, default=256 << 20, help="bytes of the collective beside the matmul"
    )
    parser.add_argument("--no-nccl", dest="nccl", action="store_false", help="leave NCCL out")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda is not available; nothing was measured", file=sys.stderr)
        return 1
    arguments.sizes = [4 << 10 << 2 * i for i in range(11) if 4 << 10 << 2 * i <= arguments.largest]
    with tempfile.TemporaryDirectory() as directory:
        arguments.rendezvous = Path(directory) / "store"
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        mp.start_processes(
            rank_main, (arguments, results), nprocs=arguments.ranks, start_method="spawn"
        )
        report(*results.get(), arguments.out, arguments.hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
