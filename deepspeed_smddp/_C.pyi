"""The compiled collectives (csrc/torch)."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypedDict

from torch._C._distributed_c10d import Backend, Store

BUILT_WITH_TORCH: str

class StatisticsRow(TypedDict):
    """One collective on one path since the start or the last reset.

    A call runs in one or more rounds, each within the bucket's bound; ``largest_round`` is in
    bytes. ``seconds`` counts from a call to its completion, ``wait_seconds`` inside ``wait()``.
    """

    collective: str
    path: str
    calls: int
    bytes: int
    rounds: int
    largest_round: int
    seconds: float
    wait_seconds: float

class ProcessGroupSMDDP(Backend):
    """A group whose AllGather, ReduceScatter, AllReduce and barrier are smddp's own.

    ``fallback_factory(device_type)`` makes the backend for everything else. It is called at most
    once per device type, under the GIL, by the first operation that needs it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group_name: str,
        fallback_factory: Callable[[str], Backend],
    ) -> None: ...

def configure(
    *,
    allgather_bucket_bytes: int = 0,
    allgather_bucket_elements: int = 0,
    reduce_scatter_bucket_bytes: int = 0,
    reduce_precision_fp32: bool = False,
    fallback: str = "warn",
) -> None:
    """Sets the process-wide options of operations started from now on; 0 means the default."""

def statistics() -> list[StatisticsRow]:
    """Counters of every collective and path; the path of a fallback row is ``fallback:<name>``."""

def reset_statistics() -> None:
    """Sets all counters to zero."""

def fabric_description() -> str:
    """Provider, version and interface of libfabric.

    Raises:
        RuntimeError: libfabric is missing or offers no usable provider, in one sentence.
    """
