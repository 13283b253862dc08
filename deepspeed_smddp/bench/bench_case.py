"""What is measured: operations, sizes and types, and the bytes that each one stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_smddp.errors import CommandError

TITLES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather_coalesced": "AllGather of 8 tensors",
    "reduce_scatter_coalesced": "ReduceScatter of 8 tensors",
}
# Bytes of an element.
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
TENSORS = 8  # of a coalesced operation
ROOT = 0  # the rank that has the input of Broadcast, the result of Reduce
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 40


class BenchError(CommandError):
    """What is wrong with the question, or with the start of the ranks, in one sentence."""

    status = 2


@dataclass(frozen=True)
class Case:
    """One operation, type and size.

    ``size``: bytes of AllGather's output, of ReduceScatter's input, of the tensor of the others, on
    one rank; of a coalesced operation, of all its tensors. This is the size of nccl-tests.
    """

    op: str
    dtype: str
    size: int

    @property
    def gathers(self) -> bool:
        """Whether it moves data and sums nothing."""
        return self.op.startswith("all_gather") or self.op == "broadcast"

    @property
    def has_root(self) -> bool:
        """Whether one rank has the input or the result."""
        return self.op in ("broadcast", "reduce")

    @property
    def in_place(self) -> bool:
        """Whether one tensor is input and result."""
        return self.op == "all_reduce" or self.has_root

    def bus_factor(self, ranks: int) -> float:
        """busbw / algbw of nccl-tests, doc/PERFORMANCE.md.

        2(n-1)/n of AllReduce, 1 of Broadcast and Reduce, (n-1)/n of the others.
        """
        if self.has_root:
            return 1.0
        return (2 if self.op == "all_reduce" else 1) * (ranks - 1) / ranks

    def link_bytes(self, ranks_of_hosts: Sequence[int]) -> float:
        """Least bytes in each direction over the busiest host's NICs, whatever the algorithm.

        AllGather: a host receives the output without its own ranks' part. ReduceScatter: it sends
        one partial sum of the input without that part. AllReduce: both, one after the other.
        Broadcast and Reduce: the tensor passes the NICs of each host once.
        """
        if self.has_root:
            return float(self.size)
        foreign = 1 - min(ranks_of_hosts) / sum(ranks_of_hosts)
        return (2 if self.op == "all_reduce" else 1) * self.size * foreign

    def tensor_counts(self, ranks: int) -> list[int]:
        """Elements per rank of each tensor; a coalesced operation has tensors of rising length."""
        count = self.size // DTYPES[self.dtype] // ranks
        if not self.op.endswith("coalesced"):
            return [count]
        parts = TENSORS * (TENSORS + 1) // 2
        counts = [count * (t + 1) // parts for t in range(TENSORS - 1)]
        return [n for n in (*counts, count - sum(counts)) if n]


def cases(
    ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int
) -> list[Case]:
    """Every operation, type and size; sizes are rounded to whole elements per rank."""
    found: dict[Case, None] = {}
    for op in ops:
        for dtype in dtypes:
            step = DTYPES[dtype] * ranks
            found |= {Case(op, dtype, max(1, size // step) * step): None for size in sizes}
    return list(found)


def sizes(smallest: str, largest: str, factor: int) -> list[int]:
    """From ``smallest`` on, each ``factor`` times the one before, up to ``largest``.

    Raises:
        BenchError: a text is no size, or the sizes do not rise.
    """
    size, last = parse_size(smallest, "--min"), parse_size(largest, "--max")
    if size > last:
        raise BenchError(f"--min is {smallest} and --max is {largest}; --min is the smaller one")
    found = []
    while size <= last:
        found.append(size)
        size *= factor
    return found


def parse_size(text: str, option: str) -> int:
    """Bytes of ``64K``, ``1.5M``, ``4096`` or ``1GiB``.

    Raises:
        BenchError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 1 <= size <= _LARGEST:
        raise BenchError(f"{option} is {text!r}; it is a size such as 4096, 64K, 1M or 1G")
    return size


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names in a list with commas; "all" or an empty text: all of them.

    Raises:
        BenchError: a name is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known and names != ["all"]:
            raise BenchError(f"{option} has {name!r}; it may have {', '.join(known)}")
    return list(known) if names in ([], ["all"]) else list(dict.fromkeys(names))
