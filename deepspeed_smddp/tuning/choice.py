"""Chooses bucket sizes from a measured network model: a pure function.

The rules, one for each key:

- An AllGather is cut into pieces that the network carries at nearly the full rate. They are as long
  as possible up to :data:`LARGEST_PIECE`: each piece takes processor time, which the layers need,
  and early parameters have AllGathers of their own.
  On GPUs a piece takes no time of a processor that layers need: there it is as short as possible.
- A ReduceScatter is cut by the same rule, but only if large ones were slower.
- A bucket of gradients holds a few such pieces. It bounds how far the backward pass is ahead of the
  network.
- ZeRO-3 prefetches a few pieces, and at least as many bytes as take :data:`AHEAD_SECONDS`: with
  fewer in flight the network is idle whenever a layer computes.
- A parameter that the network carries in less than one start-up (n_1/2 = latency x rate of
  Hockney's model, Parallel Computing 20, 1994) is not worth partitioning: every rank keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.units import size_text

# At least this part of the best rate is nearly the full rate.
NEARLY = 0.9
AHEAD_PIECES = 4
AHEAD_SECONDS = 0.02
SMALLEST_BUCKET = 64 << 10  # bytes
# A ZeRO-3 step of 28.8 million parameters on 2 hosts with links of 1 Gbit/s took 754, 727, 723, 712
# and 722 ms with 64 KiB, 256 KiB, 1 MiB, 4 MiB and 16 MiB, and 631, 634, 608, 566 and 581 ms of a
# rank's processor.
LARGEST_PIECE = 4 << 20
# DeepSpeed's own (runtime/zero/config.py), in elements, are the upper bounds of the choice.
ZERO_DEFAULTS = {
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "reduce_bucket_size": 500_000_000,
}
ZERO_KEYS = tuple(ZERO_DEFAULTS)
SMDDP_KEYS = settings.BUCKETS

# Bounds of what a stored model may hold. The start-up measures one of its sizes again: a size that
# no run has measured would take the job's memory.
MOST_POINTS = 64
Size = Annotated[int, Field(gt=0, le=256 << 20)]  # bytes
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
_Points = TypeVar("_Points")


def rising(points: _Points, sizes: Sequence[int]) -> _Points:
    """The points, if their sizes rise.

    Raises:
        ValueError: they do not.
    """
    if any(a >= b for a, b in pairwise(sizes)):
        raise ValueError("the sizes do not rise")
    return points


@dataclass(frozen=True)
class Point:
    """One measured size: bytes of all ranks' shards together, seconds from call to completion."""

    size: Size
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


_Curve = Annotated[
    tuple[Point, ...],
    Field(min_length=2, max_length=MOST_POINTS),
    AfterValidator(lambda points: rising(points, [point.size for point in points])),
]


@dataclass(frozen=True)
class NetworkModel:
    """Measured points of one group's network, per collective in ascending order of size."""

    allgather: _Curve
    reduce_scatter: _Curve


@dataclass(frozen=True)
class Choice:
    """Values for the keys that may hold "auto"; bytes for smddp's, elements for DeepSpeed's.

    0 for ``reduce_scatter_bucket_size`` means no bound. ``why`` has a phrase per key.
    """

    allgather_bucket_size: int
    reduce_scatter_bucket_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    reduce_bucket_size: int
    why: Mapping[str, str] = field(default_factory=dict)


def choose(network: NetworkModel, element_size: int = 2, on_gpu: bool = False) -> Choice:
    """The sizes for this network and parameters of ``element_size`` bytes per element.

    ``on_gpu``: the network model is of GPU tensors.
    """
    largest_piece = 0 if on_gpu else LARGEST_PIECE
    gather, best_gather = _piece(network.allgather, largest_piece)
    reduce, best_reduce = _piece(network.reduce_scatter, largest_piece)
    latency = network.allgather[0].seconds
    bucket = max(SMALLEST_BUCKET, gather.size)
    largest = network.reduce_scatter[-1]
    bounded = largest.rate < NEARLY * best_reduce.rate
    ahead = max(AHEAD_PIECES * bucket, int(AHEAD_SECONDS * best_gather.rate))
    half = int(latency * best_gather.rate)
    found = {
        "allgather_bucket_size": (
            bucket,
            f"{size_text(gather.size)} runs at {_rate(gather)}, at least {NEARLY:.0%} of the "
            f"{_rate(best_gather)} seen at {size_text(best_gather.size)}",
        ),
        "reduce_scatter_bucket_size": (
            max(SMALLEST_BUCKET, reduce.size) if bounded else 0,
            f"{_rate(best_reduce)} at {size_text(best_reduce.size)}, but {_rate(largest)} at "
            f"{size_text(largest.size)}"
            if bounded
            else f"no bound: {size_text(largest.size)} runs at {_rate(largest)}, near the best, "
            f"{_rate(best_reduce)}",
        ),
        "stage3_prefetch_bucket_size": (
            ahead // element_size,
            f"{AHEAD_PIECES} pieces of {size_text(bucket)}, and at least "
            f"{AHEAD_SECONDS * 1e3:.0f} ms at {_rate(best_gather)}",
        ),
        "stage3_param_persistence_threshold": (
            half // element_size,
            f"a start-up takes {latency * 1e6:.0f} us, in which {size_text(half)} travel",
        ),
        "reduce_bucket_size": (
            AHEAD_PIECES * reduce.size // element_size,
            f"{AHEAD_PIECES} times {size_text(reduce.size)}, a ReduceScatter at {NEARLY:.0%} or "
            f"more of {_rate(best_reduce)}",
        ),
    }
    sizes: dict[str, Any] = {
        key: min(size, ZERO_DEFAULTS.get(key, size)) for key, (size, _) in found.items()
    }
    return Choice(**sizes, why={key: reason for key, (_, reason) in found.items()})


def _piece(points: Sequence[Point], largest: int) -> tuple[Point, Point]:
    """The size of a piece, and the size that has the best rate.

    A piece is the largest size up to ``largest`` bytes that has nearly the best rate; if there is
    none, the smallest above.
    """
    best = max(points, key=lambda point: point.rate)
    near = [point for point in points if point.rate >= NEARLY * best.rate]
    short = [point for point in near if point.size <= largest]
    return short[-1] if short else near[0], best


def _rate(point: Point) -> str:
    return f"{point.rate / 1e9:.3g} GB/s"
