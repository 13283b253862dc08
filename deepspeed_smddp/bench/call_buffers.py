"""The tensors of one case, the call on them, and the check of its result.

An element's value follows from its index and rank, so that each rank can tell what every element of
a result must be. Values and sums are whole numbers that the type holds exactly; a result is right
if all its elements are equal to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_smddp.bench.bench_case import ROOT, Case

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Both are prime: no power of two that a chunk could have is a multiple. bf16 holds whole numbers up
# to 256. A gathered element names one of 251 ranks.
_GATHER_PERIOD, _SUM_PERIOD = 251, 7
_EXACT = {"bf16": 256, "fp16": 2048, "fp32": 1 << 24}
_PIECE = 4096  # periods that are compared at a time: the check takes little memory

# torch 2.13 renamed these.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wrong(NamedTuple):
    """The first wrong element of this rank's result: its number, its value, the right one."""

    element: int
    got: float
    expected: float


class CallBuffers:
    """Tensors of one case, of ``case.size`` bytes and the share of one rank."""

    def __init__(self, case: Case, rank: int, ranks: int, device: torch.device) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        counts = case.tensor_counts(ranks)
        kind = TORCH_DTYPES[case.dtype]
        self.whole = torch.zeros(sum(counts) * ranks, dtype=kind, device=device)
        self.part = torch.zeros(sum(counts), dtype=kind, device=device)
        self.wholes = torch.split(self.whole, [count * ranks for count in counts])
        self.parts = torch.split(self.part, counts)

    def call(self, group: dist.ProcessGroup) -> Callable[[], object]:
        """The operation on ``group``; it returns when the result is there, or is on the stream."""
        if self.case.op == "all_reduce":
            return lambda: dist.all_reduce(self.whole, group=group)
        if self.case.op == "broadcast":
            return lambda: dist.broadcast(self.whole, group=group, group_src=ROOT)
        if self.case.op == "reduce":
            return lambda: dist.reduce(self.whole, group=group, group_dst=ROOT)
        if self.case.op == "all_gather":
            return lambda: _gather(self.whole, self.part, group=group)
        if self.case.op == "reduce_scatter":
            return lambda: _scatter(self.part, self.whole, group=group)
        return lambda: self._coalesced(group)

    def _coalesced(self, group: dist.ProcessGroup) -> None:
        with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
            for whole, part in zip(self.wholes, self.parts, strict=True):
                if self.case.gathers:
                    _gather(whole, part, group=group)
                else:
                    _scatter(part, whole, group=group)

    def prepare(self) -> None:
        """Before calls whose result is not looked at: sums in place of zeros stay zeros."""
        if self.case.in_place:
            self.whole.zero_()

    def check(self, call: Callable[[], object]) -> Wrong | None:
        """Calls once, and compares every element of this rank's result with what it must be."""
        in_place = self.case.in_place
        source = self.part if self.case.gathers and not in_place else self.whole
        result = self.whole if self.case.gathers or in_place else self.part
        result.fill_(-1)
        if self.case.op != "broadcast" or self.rank == ROOT:
            _fill(source, self._table(self.rank))
        call()
        for tensor, table, phase in self._expected():
            wrong = _first_difference(tensor, table.roll(-(phase % len(table))))
            if wrong is not None:
                # The same storage: the distance is the index in the whole result.
                before = int(tensor.storage_offset() - result.storage_offset())
                return wrong._replace(element=wrong.element + before)
        return None

    def _expected(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Parts of the result, each with the table that it repeats, and its first index there."""
        if self.case.op == "broadcast":
            yield self.whole, self._table(ROOT), 0
            return
        if self.case.op == "reduce" and self.rank != ROOT:
            return
        if self.case.gathers:
            first = 0
            for whole, part in zip(self.wholes, self.parts, strict=True):
                for rank, block in enumerate(torch.split(whole, len(part))):
                    yield block, self._table(rank), first
                first += len(part)
            return
        tables = [self._table(rank).float() for rank in range(self.ranks)]
        sums = torch.stack(tables).sum(0).to(self.whole.dtype)
        if self.case.in_place:
            yield self.whole, sums, 0
            return
        first = 0
        for part in self.parts:
            yield part, sums, first + self.rank * len(part)
            first += len(part) * self.ranks

    def _table(self, rank: int) -> torch.Tensor:
        """The values of the first elements of a rank's input; they repeat."""
        if self.case.gathers:
            values = (torch.arange(_GATHER_PERIOD) + rank) % _GATHER_PERIOD
        else:
            values = (torch.arange(_SUM_PERIOD) + 3 * rank) % _SUM_PERIOD
            if (_SUM_PERIOD - 1) * self.ranks > _EXACT[self.case.dtype]:
                values = (values == 0).int()
        return values.to(self.whole)


def _pieces(tensor: torch.Tensor, table: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """Slices of the tensor from an index on, each with the values that repeat the table."""
    step = len(table) * _PIECE
    values = table.repeat(min(_PIECE, len(tensor) // len(table) + 1))
    for first in range(0, len(tensor), step):
        piece = tensor[first : first + step]
        yield first, piece, values[: len(piece)]


def _fill(tensor: torch.Tensor, table: torch.Tensor) -> None:
    for _, piece, values in _pieces(tensor, table):
        piece.copy_(values)


def _first_difference(tensor: torch.Tensor, table: torch.Tensor) -> Wrong | None:
    for first, piece, values in _pieces(tensor, table):
        if not torch.equal(piece, values):
            at = int((piece != values).nonzero()[0])
            return Wrong(first + at, float(piece[at]), float(values[at]))
    return None
