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
from deepspeed_smddp.bench.timed_values import WEIGHTS, TimedValues

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Both are prime: no power of two that a chunk could have is a multiple. bf16 holds whole numbers up
# to 256. A gathered element names one of 251 ranks.
_GATHER_PERIOD, _SUM_PERIOD = 251, 7
_EXACT = {"bf16": 256, "fp16": 2048, "fp32": 1 << 24}

# torch 2.13 renamed these.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wrong(NamedTuple):
    """The first wrong element of this rank's result: its number, its value, the right one."""

    element: int
    got: float
    expected: float


class CallBuffers:
    """Tensors of one case, of ``case.size`` bytes and the share of one rank.

    ``values``: what timed calls move, repeated; another part of it on each rank.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        ranks: int,
        device: torch.device,
        values: TimedValues = WEIGHTS,
    ) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        counts = case.tensor_counts(ranks)
        kind = TORCH_DTYPES[case.dtype]
        self.whole = torch.zeros(sum(counts) * ranks, dtype=kind, device=device)
        self.part = torch.zeros(sum(counts), dtype=kind, device=device)
        self.wholes = torch.split(self.whole, [count * ranks for count in counts])
        self.parts = torch.split(self.part, counts)
        elements = values.elements(kind).to(device)
        self._timed = _repeated(elements, rank * len(self.part), len(self._source))

    def call(self, group: dist.ProcessGroup) -> Callable[[], object]:
        """The operation on ``group``; it returns when the result is there, or is on the stream."""
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(self.whole, group=group),
            "broadcast": lambda: dist.broadcast(self.whole, group=group, group_src=ROOT),
            "reduce": lambda: dist.reduce(self.whole, group=group, group_dst=ROOT),
            "all_gather": lambda: _gather(self.whole, self.part, group=group),
            "reduce_scatter": lambda: _scatter(self.part, self.whole, group=group),
        }
        return calls.get(self.case.op, lambda: self._coalesced(group))

    def _coalesced(self, group: dist.ProcessGroup) -> None:
        with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
            for whole, part in zip(self.wholes, self.parts, strict=True):
                if self.case.gathers:
                    _gather(whole, part, group=group)
                else:
                    _scatter(part, whole, group=group)

    @property
    def _source(self) -> torch.Tensor:
        """The input."""
        return self.part if self.case.gathers and not self.case.in_place else self.whole

    def prepare(self) -> None:
        """Before a timed call. In place, its result is what the next one would move."""
        self._source.copy_(self._timed)

    def check(self, call: Callable[[], object]) -> Wrong | None:
        """Calls once, and compares every element of this rank's result with what it must be."""
        case, source = self.case, self._source
        result = self.whole if case.gathers or case.in_place else self.part
        result.fill_(-1)
        if case.op != "broadcast" or self.rank == ROOT:
            source.copy_(_repeated(self._table(self.rank), 0, len(source)))
        call()
        if case.op == "reduce" and self.rank != ROOT:
            return None
        expected = torch.cat(list(self._expected()))
        differing = (result != expected).nonzero()
        if len(differing) == 0:
            return None
        at = int(differing[0])
        return Wrong(at, float(result[at]), float(expected[at]))

    def _expected(self) -> Iterator[torch.Tensor]:
        """The parts of the result, in its order."""
        tables = [self._table(rank) for rank in range(self.ranks)]
        sums = torch.stack([table.float() for table in tables]).sum(0).to(self.whole.dtype)
        if self.case.in_place:
            table = tables[ROOT] if self.case.gathers else sums
            yield _repeated(table, 0, len(self.whole))
            return
        first = 0
        for part in self.parts:
            if self.case.gathers:
                yield from (_repeated(table, first, len(part)) for table in tables)
                first += len(part)
            else:
                yield _repeated(sums, first + self.rank * len(part), len(part))
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


def _repeated(table: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The elements from ``first`` on of a tensor that repeats the table."""
    return table.roll(-(first % len(table))).repeat(-(-count // len(table)))[:count]
