"""What is measured: operations, sizes, and the bytes that have to cross a host's interface."""

from __future__ import annotations

from dataclasses import dataclass

# What ZeRO-3 sends: parameters are gathered, gradients are summed in bf16.
DTYPE_OF = {"all_gather": "fp32", "reduce_scatter": "bf16", "all_reduce": "bf16"}
BYTES_OF = {"fp32": 4, "bf16": 2}
OPS = tuple(DTYPE_OF)
SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    op: str
    dtype: str
    bytes: int  # of the whole: AllGather's output, ReduceScatter's input, AllReduce's buffer


def lower_bound(op: str, size: int, hosts: int) -> float:
    """Bytes that cross one host's interface in the busier direction, whatever the algorithm.

    AllGather: all but the own host's part of the output comes in. ReduceScatter: the partial sums
    of all but the own host's part of the input go out. AllReduce: both, one after the other.
    """
    once = size * (hosts - 1) / hosts
    return 2 * once if op == "all_reduce" else once


def parse_size(text: str) -> int:
    unit = SIZE_UNITS.get(text[-1:].upper(), 0)
    return int(float(text[:-1]) * unit) if unit else int(text)


def parse_sizes(text: str) -> list[int]:
    """A comma-separated list, in which `4K..256M` stands for every fourfold step."""
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


def cases(ops: list[str], sizes: list[int], ranks: int) -> list[Case]:
    """Every operation and size, rounded to whole elements per rank."""
    out = []
    for op in ops:
        dtype = DTYPE_OF[op]
        step = BYTES_OF[dtype] * ranks
        for size in sizes:
            case = Case(op, dtype, max(1, size // step) * step)
            if case not in out:
                out.append(case)
    return out
