"""What one rank knows for a report: its operations, its groups, the stacks of its threads.

The result is plain data for JSON; ``diagnostics/report/dump.py`` describes its fields.
"""

from __future__ import annotations

import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from deepspeed_smddp.deepspeed import monitoring
from deepspeed_smddp.diagnostics.doctor import network_facts
from deepspeed_smddp.diagnostics.report.dump_terms import IN_ORDER, LINK
from deepspeed_smddp.distributed import backend, labels

VERSION = 1
# What follows the name of a group in records of operations that it hands to another backend.
FORWARDED = " (forwarded)"
# The same for operations on tensors of a GPU.
ON_DEVICE = " (device)"
_MOST_FRAMES = 60


def collect(
    job: str,
    rank: int,
    ranks: int,
    reason: str,
    error: str = "",
    clock: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The dump of this process, which is ``rank`` of the job's ``ranks``.

    Args:
        reason: why a report is made: the error of an operation, a signal, another rank's words.
        error: of an operation of this rank, "" if none has failed.
        clock: how far this rank's clock is ahead of rank 0's, if it has asked.
    """
    from deepspeed_smddp import _C

    states = backend.states(with_connections=True)
    operations: list[dict[str, Any]] = [_with_parameters(row) for row in _C.flight_record()]
    for group in list(states):
        over = f"of group '{group['name']}' over "
        states.append(_beside(group, FORWARDED, operations, error if over in error else ""))
        on_device = _beside(group, ON_DEVICE, operations, "")
        if on_device["submitted"]:
            failed = (r["state"] for r in operations if r["group"] == on_device["name"])
            states.append({**on_device, "error": error if "failed" in failed else ""})
    return {
        "version": VERSION,
        "job": job,
        "rank": rank,
        "ranks": ranks,
        "host": next((group["hosts"][group["rank"]] for group in states), socket.gethostname()),
        "pid": os.getpid(),
        "time": time.time(),
        "reason": reason,
        "error": next((group["error"] for group in states if group["error"]), error),
        "operations": operations,
        "groups": states,
        "stacks": stacks(),
        "network": _network(states),
        "clock": clock,
        "steps": monitoring.step_ends(),
    }


def shortened(dump: dict[str, Any], operations: int) -> dict[str, Any]:
    """What a page is made of: the last ``operations``, and connections that are not in order."""
    last = dump["operations"][-operations:]
    groups = [
        {**group, "connections": [c for c in group["connections"] if c["state"] not in IN_ORDER]}
        for group in dump["groups"]
    ]
    return {
        **dump,
        "operations": [{**row, "parameters": []} for row in last],
        "groups": groups,
    }


def _with_parameters(row: Mapping[str, Any]) -> dict[str, Any]:
    label, parameters = labels.split(row["label"])
    return {**row, "label": label, **({"parameters": parameters} if parameters else {})}


def _beside(
    group: dict[str, Any], suffix: str, operations: list[dict[str, Any]], error: str
) -> dict[str, Any]:
    """The operations of a group that are recorded under another name, as a group of their own."""
    name = group["name"] + suffix
    numbers = [row["sequence"] for row in operations if row["group"] == name]
    return {
        **group,
        "name": name,
        "submitted": max(numbers, default=0),
        "finished": 0,
        "oldest": None,
        "peers": [],
        "connections": [],
        "error": error,
    }


def stacks() -> list[dict[str, Any]]:
    """The Python stack of each thread but the calling one, innermost frame last."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread = names.get(ident)
        found.append(
            {
                "thread": thread.name if thread is not None else f"thread {ident}",
                "main": thread is threading.main_thread(),
                "frames": _frames(frame),
            }
        )
    return sorted(found, key=lambda stack: not stack["main"])


def _frames(innermost: FrameType | None) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while innermost is not None and len(frames) < _MOST_FRAMES:
        code = innermost.f_code
        line = innermost.f_lineno or code.co_firstlineno
        frames.append(
            {
                "file": code.co_filename,
                "line": line,
                "function": code.co_name,
                "text": linecache.getline(code.co_filename, line).strip(),
                "owner": _module_called(innermost),
            }
        )
        innermost = innermost.f_back
    return frames[::-1]


def _module_called(frame: FrameType) -> str:
    """The class of the model's module whose hooks and forward a frame of torch calls."""
    if frame.f_code is not torch.nn.Module._call_impl.__code__:
        return ""
    return type(frame.f_locals.get("self")).__name__


def _network(states: list[dict[str, Any]]) -> dict[str, str | float]:
    refused = [row["calls"] for row in backend.statistics() if row["collective"] == "refused"]
    chosen = {
        name: value
        for name in ("FABRIC_PROVIDER", "FABRIC_INTERFACE")
        if (value := os.environ.get(f"SMDDP_{name}", ""))
    }
    paths = {c["path"] for group in states for c in group["connections"]}
    nics = {nic for path in paths for nic in network_facts.nics_of(path)}
    links = {f"{LINK}{nic}": network_facts.link_state(nic) for nic in sorted(nics)}
    return {**chosen, **links, "refused messages": float(sum(refused))}
