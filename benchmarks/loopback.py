"""smddp beside Gloo on this machine's loopback, in the same processes, in turn: A B A B.

For every operation, element type and size: a correctness check against Gloo, then rounds of timed
calls, one backend after the other. Prints medians and bus bandwidth (as nccl-tests defines it:
bytes / time * (n-1)/n, twice that for all_reduce) and writes all figures as CSV.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

OPS = ("all_gather", "reduce_scatter", "all_reduce")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Result:
    op: str
    dtype: str
    bytes: int  # of the whole: AllGather's output, ReduceScatter's input, AllReduce's tensor
    backend: str
    median_us: float
    p90_us: float
    min_us: float
    algbw_gbs: float
    busbw_gbs: float
    calls: int


def make_call(
    op: str, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    return lambda: dist.all_reduce(whole, group=group)


def check(op: str, dtype: torch.dtype, count: int, groups: dict[str, dist.ProcessGroup]) -> None:
    """Small integers, so that every order of summation gives the same bits."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    seen = []
    for group in groups.values():
        whole = ((torch.arange(count * ranks) + rank) % 7).to(dtype)
        part = ((torch.arange(count) * (rank + 1)) % 7).to(dtype)
        make_call(op, whole, part, group)()
        seen.append((whole.clone(), part.clone()))
    for whole, part in seen[1:]:
        if not (torch.equal(whole, seen[0][0]) and torch.equal(part, seen[0][1])):
            raise SystemExit(f"{op} of {count} {dtype} per rank: the backends disagree")


def worker(
    rank: int, args: argparse.Namespace, port: int, queue: mp.SimpleQueue[dict[str, Any]]
) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.hosts > 1:
        os.environ["SMDDP_HOST_ID"] = f"host{rank * args.hosts // args.ranks}"
        os.environ.setdefault("SMDDP_FABRIC_INTERFACE", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("smddp", rank=rank, world_size=args.ranks)
    groups = {"smddp": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for op in args.ops:
        for name in args.dtypes:
            dtype = DTYPES[name]
            for size in args.sizes:
                count = max(1, size // dtype.itemsize // args.ranks)
                check(op, dtype, count, groups)
                whole = torch.ones(count * args.ranks, dtype=dtype)
                part = torch.ones(count, dtype=dtype)
                calls = {b: make_call(op, whole, part, g) for b, g in groups.items()}
                times: dict[str, list[float]] = {b: [] for b in calls}
                per_turn = max(2, min(50, int(2e6 // max(1, size // 256))))
                for turn in range(args.turns + 1):  # the first warms up
                    for backend, call in calls.items():
                        for _ in range(per_turn):
                            whole.fill_(1) if op == "all_reduce" else None
                            dist.barrier()
                            begin = time.perf_counter()
                            call()
                            if turn > 0:
                                times[backend].append(time.perf_counter() - begin)
                for backend, measured in times.items():
                    # An operation takes as long as on its slowest rank.
                    slowest = torch.tensor(measured, dtype=torch.float64)
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    if rank == 0:
                        queue.put(
                            summary(
                                op,
                                name,
                                count * args.ranks * dtype.itemsize,
                                backend,
                                slowest.tolist(),
                                args.ranks,
                            )
                        )
    dist.destroy_process_group()


def summary(
    op: str, dtype: str, size: int, backend: str, seconds: list[float], ranks: int
) -> dict[str, Any]:
    median = statistics.median(seconds)
    algbw = size / median / 1e9
    factor = (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
    ordered = sorted(seconds)
    return asdict(
        Result(
            op,
            dtype,
            size,
            backend,
            median * 1e6,
            ordered[int(0.9 * (len(ordered) - 1))] * 1e6,
            ordered[0] * 1e6,
            algbw,
            algbw * factor,
            len(seconds),
        )
    )


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "operation", "type", "bytes", "smddp us", "gloo us", "gloo / smddp", "smddp busbw GB/s"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    pairs: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        pairs.setdefault((row["op"], row["dtype"], row["bytes"]), {})[row["backend"]] = row
    for (op, dtype, size), both in pairs.items():
        ours, gloo = both["smddp"], both["gloo"]
        table.add_row(
            op,
            dtype,
            f"{size:,}",
            f"{ours['median_us']:,.0f}",
            f"{gloo['median_us']:,.0f}",
            f"{gloo['median_us'] / ours['median_us']:.1f}",
            f"{ours['busbw_gbs']:.2f}",
        )
    console.print(table)


def run(args: argparse.Namespace) -> int:
    console = Console()
    console.print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, {args.ranks} ranks on {args.hosts} host(s); "
        "medians over the slowest rank of each call, A B A B"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(worker, (args, port, queue), nprocs=args.ranks, join=False)
    rows: list[dict[str, Any]] = []
    expected = len(args.ops) * len(args.dtypes) * len(args.sizes) * 2
    while len(rows) < expected:
        if not queue.empty():
            rows.append(queue.get())
            console.print(f"{len(rows)}/{expected}", end="\r")
        elif context.join(timeout=0.2):
            break
    while not context.join():
        pass
    show(rows, console)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"wrote {args.csv}")
    return 0
