"""Dumps as files of torch's flight recorder, for ``torch.distributed.flight_recorder.fr_trace``.

``python -m torch.distributed.flight_recorder.fr_trace --prefix rank_ FOLDER`` reads them. It wants
a file of every member of every group, or ``--allow-incomplete-ranks``.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_smddp.diagnostics.report.dump import Dump, Operation
from deepspeed_smddp.diagnostics.report.job import Job, Key

PREFIX = "rank_"
_VERSION = "2.10"
_STATES = {"queued": "scheduled", "running": "started", "failed": "started", "done": "completed"}
# dtype -> torch's name of the scalar type, bytes of an element
_DTYPES = {
    "float64": ("Double", 8),
    "float32": ("Float", 4),
    "float16": ("Half", 2),
    "bfloat16": ("BFloat16", 2),
    "int64": ("Long", 8),
    "int32": ("Int", 4),
    "int16": ("Short", 2),
    "int8": ("Char", 1),
    "uint8": ("Byte", 1),
    "bool": ("Bool", 1),
}


def write(dumps: Mapping[int, Dump], folder: Path) -> None:
    """Write ``rank_<rank>`` for each dump into a folder, which is made if it is missing.

    Raises:
        OSError: a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, trace in traces(dumps).items():
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(trace))


def traces(dumps: Mapping[int, Dump]) -> dict[int, dict[str, Any]]:
    """The content of the file of each rank, by global rank.

    Each group starts at the first operation that the rings of all its ranks still hold.
    Operations that the analyzer does not know are left out.
    """
    job = Job(dumps, {}, len(dumps))
    # A rank that has called nothing has lost nothing.
    starts = {
        key: max(min(view.rings.get(rank) or [1 + view.submitted(rank)]) for rank in view.seen)
        for key, view in job.groups.items()
    }
    return {rank: _trace(dump, job, starts) for rank, dump in job.dumps.items()}


def _trace(dump: Dump, job: Job, starts: Mapping[Key, int]) -> dict[str, Any]:
    own = [(group.name, tuple(group.members)) for group in dump.groups]
    entries = [
        _entry(operation, number, len(key[1]))
        for number, key in enumerate(own)
        for sequence, operation in job.groups[key].rings[dump.rank].items()
        if sequence >= starts[key] and operation.kind
    ]
    entries.sort(key=lambda entry: int(entry["record_id"]))
    # The analyzer drops what has a lower record_id than the first entry of any rank: operations
    # of all groups count there, so that ranks in unlike groups lose what others keep.
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    return {
        "version": _VERSION,
        "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": "undefined", "ranks": str(list(members))}
            for name, members in own
        },
        "pg_status": {},
        "host_name": dump.host,
        "rank": dump.rank,
    }


def _entry(operation: Operation, group: int, members: int) -> dict[str, Any]:
    is_done = operation.state == "done"
    name, sizes = _sizes(operation, max(members, 1))
    dtype = _DTYPES.get(operation.dtype, ("Byte", 1))[0]
    place = {"name": operation.label or "user code", "filename": operation.path or "-", "line": 0}
    return {
        "record_id": operation.id,
        "pg_id": group,
        "process_group": (operation.group, "undefined"),
        "collective_seq_id": operation.sequence,
        "p2p_seq_id": 0,
        "op_id": operation.sequence,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [sizes[0]],
        "output_sizes": [sizes[1]],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": _STATES.get(operation.state, "started"),
        "is_p2p": False,
        "retired": is_done,
        "timeout_ms": 0,
        "time_created_ns": _nanoseconds(operation.called) or 0,
        "time_discovered_started_ns": _nanoseconds(operation.started),
        "time_discovered_completed_ns": _nanoseconds(operation.last_byte) if is_done else None,
        "frames": [place],
    }


def _sizes(operation: Operation, members: int) -> tuple[str, tuple[list[int], list[int]]]:
    """The name, and the elements of a rank's input and output."""
    name = operation.kind
    elements = max(operation.bytes, 0) // _DTYPES.get(operation.dtype, ("", 1))[1]
    part, rest = divmod(elements, members)
    if name == "all_gather":
        # The analyzer checks that the parts make the whole; with unlike parts it does not.
        return ("all_gather_v" if rest else name), ([part], [elements])
    if name == "reduce_scatter":
        return ("reduce_scatter_v" if rest else name), ([elements], [part])
    return name, ([elements], [elements])


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None or not math.isfinite(seconds) else int(seconds * 1e9)
