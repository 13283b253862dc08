"""The compiled collectives (csrc/torch)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch._C._distributed_c10d import Backend, Store

BUILT_WITH_TORCH: str

class StatisticsRow(TypedDict):
    """One collective on one path since the start or the last reset.

    A call runs in ``rounds`` fragments, each within the bucket's bound; ``largest_round`` is the
    largest of them, in bytes. ``seconds`` counts from a call to its completion,
    ``wait_seconds`` inside ``wait()``.

    This rank reads the bytes of the other ranks of its host in three ways: ``slot_bytes`` went
    through a slot of shared memory, ``in_place_bytes`` were read in place, in memory that the ranks
    share (``deepspeed_smddp.memory``), and ``single_copy_bytes`` came by ``process_vm_readv``. It
    has sent ``sent_bytes`` to other hosts, which stand for ``sent_raw_bytes``: coded, fewer travel
    (docs/coding.md).

    If processes outside the job have sent to this rank, the row of ``collective`` ``"refused"``
    counts in ``calls`` what was dropped (docs/security.md). The last messages of a group that this
    rank has left count, too.
    """

    collective: str
    path: str
    calls: int
    bytes: int
    rounds: int
    largest_round: int
    slot_bytes: int
    in_place_bytes: int
    single_copy_bytes: int
    sent_bytes: int
    sent_raw_bytes: int
    seconds: float
    wait_seconds: float

class MemoryStatistics(TypedDict):
    """The process's use of memory that the host's ranks share.

    ``in_use`` and its ``peak`` are bytes of live tensors, ``blocks`` their number; ``reserved`` is
    the address space of the ``segments`` that hold them (the kernel adds a page at its first
    access), ``huge`` the part of it in huge pages; ``kept`` are bytes of freed pages that wait for
    new tensors. ``refused`` counts requests that got ordinary memory instead.
    """

    in_use: int
    peak: int
    blocks: int
    segments: int
    reserved: int
    kept: int
    huge: int
    refused: int

class DeviceStatistics(TypedDict):
    """The device memory of its peers that the process has mapped.

    ``hits`` and ``misses`` count searches for an allocation, ``replaced`` counts mappings whose
    owner had freed the allocation, or was about to; ``mapped`` is in bytes.
    ``freed_while_mapped`` counts what the simulated device freed while a peer had it mapped.
    ``kernels``: this build has kernels for GPUs.
    """

    hits: int
    misses: int
    replaced: int
    mapped: int
    freed_while_mapped: int
    kernels: bool

class CudaReport(TypedDict):
    """From NVIDIA's driver: the API's version, the GPUs, pairs of GPUs without peer access."""

    version: str
    devices: list[str]
    apart: list[tuple[int, int]]

class ProcessGroupSMDDP(Backend):
    """A group whose AllGather, ReduceScatter, AllReduce and barrier are smddp's own.

    ``fallback_factory(device_type, rendezvous, address)`` makes the backend for all other
    operations. The first operation that needs it calls it, at most once per device type, under the
    GIL. ``rendezvous`` names the one that made the group and is the same on all its ranks.
    ``address``: at which they reach this host; empty if that is not known.
    ``ranks``: the numbers of the group's ranks in the job, by which errors and states call them;
    empty: the group's own. ``whole_job``: all ranks of the job take part, so that they need not
    tell later groups what their processes are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group_name: str,
        fallback_factory: Callable[[str, str, str], Backend],
        measure_routes: Callable[[ProcessGroupSMDDP, str, str], list[tuple[int, str]] | None],
        ranks: list[int],
        whole_job: bool = False,
    ) -> None: ...
    def _force_route(self, route: str) -> None:
        """For the measurement: its thread's operations take this route; "" ends that."""

    def at_end(self, end: Callable[[], None]) -> None:
        """``end`` is called once the group has left, after those given before, on the thread that
        destroys it."""

    @property
    def rendezvous(self) -> str:
        """The name of the rendezvous that made the group, for keys in its store."""

def configure(
    *,
    allgather_bucket_bytes: int = 0,
    allgather_bucket_elements: int = 0,
    reduce_scatter_bucket_bytes: int = 0,
    reduce_precision_fp32: bool = False,
    coding: str = "auto",
    fallback: str = "warn",
    max_sms: int = 9,
    reduce_on_cpu: bool = False,
    check_first_use: bool = True,
    silence_seconds: float = 30.0,
    routes: dict[str, list[tuple[int, str]]] = ...,
) -> None:
    """Sets the process-wide options of operations started from now on; 0 means the default."""

def statistics() -> list[StatisticsRow]:
    """Counters of every collective and path; the path of a fallback row is ``fallback:<name>``."""

def reset_statistics() -> None:
    """Sets all counters to zero."""

class RecordedOperation(TypedDict):
    """One operation in the flight recorder; times are seconds since 1970, or None."""

    id: int
    group: str
    sequence: int
    operation: str
    bytes: int
    dtype: str
    path: str
    label: str
    state: str
    called: float | None
    started: float | None
    first_byte: float | None
    last_byte: float | None
    wait_entered: float | None
    wait_left: float | None

def flight_record() -> list[RecordedOperation]:
    """The last operations of this process over all groups, in the order of their calls."""

def group_states(with_connections: bool = False) -> list[dict[str, Any]]:
    """Each group that is not destroyed: members, operations counted, what the oldest awaits.

    ``peers`` has what was counted of other ranks, ``connections``, if asked for, what is known of
    the way to each: see ``diagnostics/report/dump.py``. ``coding`` is the last answer to
    whether coding pays: ``answers`` so far, ``pays``, the ``ratio`` of coded to raw bytes, and
    bytes per second of the ``network``, for this rank, and of the ``code``.
    """

class CodingMeasurement(TypedDict):
    """``sent_bytes``: what would travel of the tensor; seconds of coding and decoding all of it."""

    sent_bytes: int
    encode_seconds: float
    decode_seconds: float

def measure_coding(tensor: torch.Tensor) -> CodingMeasurement:
    """Codes and decodes a tensor's values on this thread.

    Raises:
        ValueError: the tensor is not contiguous, or not on the CPU.
    """

def stored_network(hosts: list[str]) -> str:
    """What an earlier job has measured between hosts, with its date; "" if none has.

    ``hosts`` is the identity of each rank's host. Opens the network.
    """

def label_number(label: str) -> int:
    """The number of a label for :func:`set_label`; "" has 0."""

def set_label(number: int, parameters: int = 0) -> None:
    """The operations that this thread calls from now on have the label, until the next call.

    ``parameters``: 32 bits that tell which parameters they move, compared by the ranks; 0: unknown.
    """

def set_recording(on: bool) -> None:
    """Whether operations that begin from now on are recorded."""

def error_notification() -> int:
    """A file descriptor that is readable once an operation has failed or a report is asked for."""

def take_error() -> str:
    """What came since the last call; "" if nothing did."""

def ask_for_report(why: str) -> None:
    """Asks for a report, for the reason ``why``."""

def reported() -> None:
    """The report of what :func:`take_error` returned is made: errors are held back no longer."""

def hold_errors(limit: timedelta) -> None:
    """From now on errors of operations wait until :func:`reported`, at most for ``limit``."""

def report_at_signal(number: int) -> bool:
    """Asks for a report at a signal; False if the program handles that signal itself."""

def shared_empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor in shared memory, or in ordinary memory if there is none."""

def share_storage(tensor: torch.Tensor) -> bool:
    """Moves the tensor's storage into shared memory; False if its memory is not torch's own.

    Raises:
        ValueError: the tensor is sparse or not on the CPU.
    """

def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor's whole storage lies in memory that the host's ranks share."""

def memory_statistics() -> MemoryStatistics:
    """Counters of the shared memory."""

def trim_memory() -> None:
    """Returns all pages of shared memory that no tensor needs to the kernel."""

def install_shared_allocator() -> None:
    """Puts CPU tensors of 64 KiB and more that are created from now on into shared memory."""

def shared_allocator_installed() -> bool:
    """Whether :func:`install_shared_allocator` was called."""

def device_statistics() -> DeviceStatistics:
    """Counters of all devices of the process together."""

def cuda_report() -> CudaReport:
    """Describes this machine's GPUs, without a context on any of them.

    Raises:
        RuntimeError: there is no driver, or it fails; the text is one sentence.
    """

def host_device_empty(bytes: int) -> torch.Tensor:
    """Bytes on the device that threads emulate, for tests; the core treats them as device memory.

    Raises:
        ValueError: ``SMDDP_DEVICE`` is not ``host``.
    """

def host_device_reads_peers(how: str) -> None:
    """What memory of peers holds that this device maps from now on, for tests.

    ``right``, ``wrong``: other bytes, ``stale``: those of now.
    """

def host_device_loses_sums(loses: bool) -> None:
    """Whether sums that are submitted to this device from now on do nothing, for tests."""

def host_device_records(begins: bool) -> int:
    """From then on until it is called with False, the caller's stream records a graph: commands."""

def host_device_memory(largest: int, keeps_bytes: bool) -> None:
    """How this device allocates from now on, for tests: ``largest`` bytes at most.

    ``keeps_bytes``: new memory holds the bytes of memory of its size that was freed.
    """

def set_packaged_libfabric(path: str) -> None:
    """Names a libfabric that a Python package brought; tried if the environment names none."""

def fabric_description() -> str:
    """Provider and interface, and the version and the path of libfabric.

    Raises:
        RuntimeError: libfabric is missing or offers no usable provider; the text is one sentence.
    """
