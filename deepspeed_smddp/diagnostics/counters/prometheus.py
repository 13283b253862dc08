"""The counters in Prometheus's text format, as node exporter's textfile collector reads it.

https://prometheus.io/docs/instrumenting/exposition_formats/ has the format. Times are left out: the
collector refuses files with timestamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from deepspeed_smddp.diagnostics.counters.snapshot import Snapshot

# The key of a row -> the metric's name and help.
_OF_ROWS: tuple[tuple[Literal["calls", "bytes", "seconds", "wait_seconds"], str, str], ...] = (
    ("calls", "smddp_calls_total", "Collective operations of this rank."),
    ("bytes", "smddp_bytes_total", "Bytes of all ranks' blocks: outputs gathered, inputs reduced."),
    ("seconds", "smddp_seconds_total", "Seconds from the calls to their completion, summed."),
    ("wait_seconds", "smddp_wait_seconds_total", "Seconds that callers spent in wait()."),
)
# States of shared memory, in bytes.
_STATES: tuple[Literal["in_use", "peak", "reserved", "kept", "huge"], ...] = (
    "in_use",
    "peak",
    "reserved",
    "kept",
    "huge",
)


def text(snapshot: Snapshot) -> str:
    """The whole file. Several ranks' files in one folder agree on types and help texts."""
    return "".join(f"{line}\n" for line in _lines(snapshot))


def _lines(snapshot: Snapshot) -> Iterator[str]:
    rank = {"rank": str(snapshot.rank)}
    for key, name, meaning in _OF_ROWS:
        samples = [
            ({"collective": row["collective"], "path": row["path"], **rank}, row[key])
            for row in snapshot.collectives
        ]
        yield from _metric(name, "counter", meaning, samples)
    memory = snapshot.memory
    yield from _metric(
        "smddp_memory_bytes",
        "gauge",
        "Memory that the ranks of a host share, in bytes, by state; the states overlap.",
        [({"state": state, **rank}, memory[state]) for state in _STATES],
    )
    yield from _metric(
        "smddp_memory_blocks", "gauge", "Tensors in shared memory.", [(rank, memory["blocks"])]
    )
    yield from _metric(
        "smddp_memory_refused_total",
        "counter",
        "Requests for shared memory that got ordinary memory instead.",
        [(rank, memory["refused"])],
    )
    yield from _metric(
        "smddp_refused_messages_total",
        "counter",
        "Messages from processes outside the job that this rank dropped.",
        [(rank, snapshot.refused)],
    )


def _metric(
    name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{label}="{escaped(held)}"' for label, held in labels.items())
        yield f"{name}{{{shown}}} {value!r}"


def escaped(value: str) -> str:
    """A label's value, as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
