"""One rank of torch.distributed that runs collectives in turns, with the protocol of turns.h.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... torch_collectives.py BACKEND PIPES
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls.cases import COALESCED, FROM_TORCH_ALONE, MESSAGE, tensor_counts
from shared import rank_commands

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pieces(
    tensor: torch.Tensor, table: torch.Tensor, first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Short slices of the tensor, each with its values in `table`, which repeats from `first` on.

    The slices are short because eight ranks with a few copies of 256 MiB each would take much of
    a machine's memory.
    """
    step = 7 << 16
    repeated = table.repeat(min(len(tensor), step) // 7 + 2)
    for at in range(0, len(tensor), step):
        piece, phase = tensor[at : at + step], (first + at) % 7
        yield piece, repeated[phase : phase + len(piece)]


def fill(tensor: torch.Tensor, table: torch.Tensor) -> None:
    for piece, values in pieces(tensor, table, 0):
        piece.copy_(values)


def holds(tensor: torch.Tensor, table: torch.Tensor, first: int = 0) -> bool:
    return all(torch.equal(piece, values) for piece, values in pieces(tensor, table, first))


def gather_coalesced(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    with dist._coalescing_manager():
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)


class Case:
    """The buffers of one operation and size, which are kept from turn to turn."""

    def __init__(self, op: str, dtype: str, size: int) -> None:
        self.name = (op, dtype, size)
        self.op = op
        self.ranks = dist.get_world_size()
        # Of messages.
        self.partner = (dist.get_rank() + self.ranks // 2) % self.ranks
        self.calls, self.sent = 0, False
        kind = DTYPES[dtype]
        counts = [max(1, size // kind.itemsize // self.ranks)]
        if op == COALESCED:
            counts = tensor_counts(self.ranks, kind.itemsize)
        self.count = sum(counts)
        # Zeros, because in-place sums of zeros stay zeros; zero_() also touches the pages.
        self.whole = torch.empty(self.count * self.ranks, dtype=kind).zero_()
        self.part = torch.empty(self.count, dtype=kind).zero_()
        # One tensor, except for the coalesced operation.
        self.received = torch.zeros_like(self.whole) if op == "all_to_all" else self.whole
        self.wholes = self.whole.split([n * self.ranks for n in counts])
        self.parts = self.part.split(counts)

    def call(self) -> Callable[[], object]:
        whole, part = self.whole, self.part
        if self.op == COALESCED:
            return lambda: gather_coalesced(self.wholes, self.parts)
        if self.op == MESSAGE:
            return self._message
        if self.op == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part)
        if self.op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole)
        if self.op == "all_reduce":
            return lambda: dist.all_reduce(whole)
        if self.op == "all_to_all":
            return lambda: dist.all_to_all_single(self.received, whole)
        if self.op in ("gather", "scatter"):
            blocks = list(whole.split(len(part))) if dist.get_rank() == 0 else None
            call = dist.gather if self.op == "gather" else dist.scatter
            return lambda: call(part, blocks, 0)
        call = dist.broadcast if self.op == "broadcast" else dist.reduce
        return lambda: call(whole, 0)

    def _message(self) -> None:
        self.sent = (self.calls + (2 * dist.get_rank() >= self.ranks)) % 2 == 0
        self.calls += 1
        pass_on = dist.send if self.sent else dist.recv
        pass_on(self.whole, self.partner)

    def check(self) -> dict[str, Any]:
        """Compares one call's result with the data of turns.h: (i + 3 * rank) mod 7."""
        rank, count = dist.get_rank(), self.count
        of_rank = [((torch.arange(7) + 3 * r) % 7).to(self.whole.dtype) for r in range(self.ranks)]
        sums = torch.stack(of_rank).sum(0)
        gathers = self.op in ("all_gather", "gather", COALESCED)
        fill(self.part if gathers else self.whole, of_rank[rank])
        dist.barrier()
        self.call()()
        if dist.get_backend() == "fake":  # it does nothing, so there is no result to check
            right = None
        elif self.op == MESSAGE:
            right = holds(self.whole, of_rank[rank if self.sent else self.partner])
        elif self.op in FROM_TORCH_ALONE:
            right = self._is_right(of_rank, sums)
        elif gathers:
            right, first = True, 0
            for whole, part in zip(self.wholes, self.parts, strict=True):
                blocks = zip(whole.split(len(part)), of_rank, strict=True)
                right = right and all(holds(block, table, first) for block, table in blocks)
                first += len(part)
        elif self.op == "reduce_scatter":
            right = holds(self.part, sums, count * rank)
        else:
            right = holds(self.whole, sums)
        self.whole.zero_()
        self.part.zero_()
        return {"right": right}

    def _is_right(self, of_rank: list[torch.Tensor], sums: torch.Tensor) -> bool:
        """Whether the result is right. ``of_rank``: seven values of each rank."""
        rank, count = dist.get_rank(), self.count
        if self.op == "broadcast":
            return holds(self.whole, of_rank[0])
        if self.op == "reduce":
            return rank > 0 or holds(self.whole, sums)  # Gloo leaves partial sums on other ranks
        if self.op == "scatter":
            return holds(self.part, of_rank[0], count * rank)
        if self.op == "gather" and rank > 0:
            return holds(self.part, of_rank[rank])
        first = count * rank if self.op == "all_to_all" else 0
        blocks = self.received.split(count)
        return all(holds(b, table, first) for b, table in zip(blocks, of_rank, strict=True))

    def run(self, iterations: int) -> dict[str, Any]:
        call = self.call()
        stamps = [0.0] * (iterations + 1)
        dist.barrier()
        cpu = time.process_time()
        stamps[0] = time.perf_counter()
        for i in range(1, iterations + 1):
            call()
            stamps[i] = time.perf_counter()
        cpu = time.process_time() - cpu
        took = sorted(b - a for a, b in itertools.pairwise(stamps))
        return {
            "bytes": self.whole.nbytes,
            "iterations": iterations,
            "seconds": stamps[-1] - stamps[0],
            "min": took[0],
            "median": took[iterations // 2],
            "p90": took[int(0.9 * (iterations - 1))],
            "cpu": cpu,
        }


def serve(pipes: Path) -> None:
    case: Case | None = None

    def handle(verb: str, words: list[str], idle: float) -> dict[str, Any]:
        nonlocal case
        if verb == "free":
            case = None
            return {}
        op, dtype, size = words[0], words[1], int(words[2])
        if case is None or case.name != (op, dtype, size):
            case = None  # frees the old buffers first
            case = Case(op, dtype, size)
        if verb == "check":
            return case.check()
        return {**case.run(int(words[3])), "idle_cpu": idle}

    rank_commands.serve(pipes, dist.get_rank(), {"version": torch.__version__}, handle)


def start(backend: str) -> None:
    if backend != "fake":
        dist.init_process_group(backend)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=ranks)


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    backend, pipes = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    start(backend)
    serve(pipes)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
