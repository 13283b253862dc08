"""The cases that are measured: operations, types, sizes, and the least bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# As in ZeRO-3: parameters are gathered, gradients are summed in bf16.
DTYPE_OF = {
    "all_gather": "fp32",
    "reduce_scatter": "bf16",
    "all_reduce": "bf16",
    "message": "bf16",
    "all_gather_64": "fp32",
    "broadcast": "bf16",
    "reduce": "bf16",
    "all_to_all": "bf16",
    "gather": "bf16",
    "scatter": "bf16",
}
BYTES_OF = {"fp32": 4, "bf16": 2}
MESSAGE = "message"  # between rank r and rank r + half of the ranks, the other way at each call
COALESCED = "all_gather_64"  # one AllGather of 64 tensors
ALL_OPS = tuple(DTYPE_OF)
OPS = ("all_gather", "reduce_scatter", "all_reduce")
# Those that the ranks of torch.distributed measure alone.
FROM_TORCH_ALONE = ("broadcast", "reduce", "all_to_all", "gather", "scatter")
SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    op: str
    dtype: str
    # Of a message, AllGather's output, ReduceScatter's input, the buffer of AllReduce, Broadcast or
    # Reduce, a rank's input of an all-to-all, all parts together of Gather and Scatter.
    bytes: int


def tensor_counts(ranks: int, element_size: int) -> list[int]:
    """Elements per rank of each tensor of the coalesced operation, as in turns.h."""
    return [max(1, (1024 << (5 * t % 13)) // element_size // ranks) for t in range(64)]


def lower_bound(op: str, size: int, hosts: int, ranks_per_host: int) -> float:
    """Bytes that cross one host's interface in the busier direction, whatever the algorithm.

    AllGather: the host receives the output except its own part. ReduceScatter: the host sends
    partial sums of the input except its own part. AllReduce: both, one after the other. Broadcast,
    Reduce: a host receives, or sends, the buffer. All-to-all: each rank sends its input except the
    blocks for its host. Gather, Scatter: the root's host receives, or sends, the parts of the other
    hosts. Messages: those of all ranks of a host.
    """
    if op in ("broadcast", "reduce"):
        return size if hosts > 1 else 0
    if op == MESSAGE:
        return size * ranks_per_host if hosts > 1 else 0
    once = size * (hosts - 1) / hosts
    return once * {"all_reduce": 2, "all_to_all": ranks_per_host}.get(op, 1)


def parse_size(text: str) -> int:
    unit = SIZE_UNITS.get(text[-1:].upper(), 0)
    return int(float(text[:-1]) * unit) if unit else int(text)


def parse_sizes(text: str) -> list[int]:
    """Sizes from a list with commas; `4K..256M` in it stands for every fourfold step."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size = parse_size(first)
        stop = parse_size(last) if dots else size
        while size <= stop:
            sizes.append(size)
            size *= 4
        if sizes[-1] < stop:
            sizes.append(stop)
    return sizes


def cases(
    ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int
) -> list[Case]:
    """Every operation, type and size, rounded to whole elements per rank.

    If ``dtypes`` is empty, each operation has its type of DTYPE_OF. The coalesced operation has one
    size; an AllGather of as many bytes is added for comparison.
    """
    out: dict[Case, None] = {}
    for op in ops:
        for dtype in dtypes or [DTYPE_OF[op]]:
            step = BYTES_OF[dtype] * ranks
            if op == COALESCED:
                size = sum(tensor_counts(ranks, BYTES_OF[dtype])) * step
                out |= {Case(op, dtype, size): None, Case("all_gather", dtype, size): None}
            else:
                out |= {Case(op, dtype, max(1, size // step) * step): None for size in sizes}
    return list(out)
