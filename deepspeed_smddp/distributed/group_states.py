"""How far the groups of this process are, and what they have counted of the other ranks."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from deepspeed_smddp.distributed import backend

_FLOW = {"flow_bytes": "bytes", "flow_seconds": "seconds"}


def states(with_connections: bool = False) -> list[dict[str, Any]]:
    """The state of each group, with the job's numbers of its ranks; none before the first group."""
    if "deepspeed_smddp._C" not in sys.modules:
        return []
    from deepspeed_smddp import _C

    return [_by_global_ranks(group) for group in _C.group_states(with_connections)]


def _by_global_ranks(group: dict[str, Any]) -> dict[str, Any]:
    ranks = backend.global_ranks(group["name"])
    if len(ranks) != len(group["members"]):
        return group
    oldest = group["oldest"]
    if oldest is not None:
        oldest = {**oldest, "awaited": _renumbered(oldest["awaited"], ranks)}
    found = {**group, "members": ranks, "oldest": oldest}
    for key in ("peers", "connections"):
        if key in group:
            found[key] = _renumbered(group[key], ranks)
    return found


def _renumbered(rows: list[dict[str, Any]], ranks: list[int]) -> list[dict[str, Any]]:
    return [{**row, "rank": ranks[row["rank"]]} for row in rows]


def peer_statistics() -> dict[str, list[dict[str, Any]]]:
    """For each other rank how long this one waited for it, for each other host the rate of bytes.

    Returns:
        ``ranks``: rows with ``rank`` (global), ``host``, ``late_seconds`` and ``late``: time that
        callers of this rank spent in ``wait()`` after half of the ranks of a group had started a
        collective and before that rank had, and in how many collectives. ``hosts``: rows with
        ``host``, ``bytes``, ``seconds`` and ``bytes_per_second`` of the large flows from there to
        this rank, one flow by itself. All since the groups were made; ranks and hosts without
        anything to say of are left out.
    """
    ranks: dict[int, dict[str, Any]] = {}
    flows: dict[str, dict[str, Any]] = defaultdict(lambda: {"bytes": 0, "seconds": 0.0})
    for group in states():
        hosts = dict(zip(group["members"], group["hosts"], strict=False))
        for peer in group["peers"]:
            rank, host = peer["rank"], hosts[peer["rank"]]
            row = ranks.setdefault(rank, {"rank": rank, "host": host, "late_seconds": 0, "late": 0})
            for key in ("late_seconds", "late"):
                row[key] += peer[key]
            if peer["flow_bytes"] > 0:
                for key, name in _FLOW.items():
                    flows[host][name] += peer[key]
    return {
        "ranks": [row for _, row in sorted(ranks.items()) if row["late"]],
        "hosts": [
            {"host": host, **flow, "bytes_per_second": flow["bytes"] / flow["seconds"]}
            for host, flow in sorted(flows.items())
        ],
    }
