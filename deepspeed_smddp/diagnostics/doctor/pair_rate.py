"""The rate between two ranks: an AllGather of their own small group, repeated."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from typing import Any

import torch

# An AllGather grows until it takes long enough for the clock and for the queues on the way.
FIRST_BYTES = 64 << 10
MOST_BYTES = 8 << 20
_LONG_ENOUGH = 0.03  # seconds
_ALL_SECONDS = 0.15
# The value of SMDDP_FABRIC_CURVE with which a job measures whatever an earlier one has measured.
ANEW = "measure"
# The first byte of each part is a vote of its sender on the next call; both ranks see both.
_REPEAT, _GROW, _STOP = 0, 1, 2


def measure(store: Any, place: int, name: str, seconds: float) -> tuple[float, str, str]:
    """Bytes per second each way, at the same time, between this rank and one other.

    Also the network model that their group uses, as ``SMDDP_FABRIC_CURVE`` holds one, and where
    it is from. If that variable is not set, they measure it, whatever an earlier job has measured.

    Both ranks call it. The best call of the largest size counts: what else runs on the machines
    makes a call slower, never faster than the link.

    Args:
        store: of this pair alone.
        place: 0 on one rank, 1 on the other.
        name: of the pair, for error messages.
        seconds: the timeout of the meeting and of each AllGather.

    Raises:
        RuntimeError: no data passes, or not in time; says why.
    """
    from deepspeed_smddp import _C

    if os.environ.get("SMDDP_FABRIC_CURVE", "auto") in ("", "auto"):
        os.environ["SMDDP_FABRIC_CURVE"] = ANEW
    timeout = timedelta(seconds=seconds)
    group = _C.ProcessGroupSMDDP(store, place, 2, timeout, name, _no_fallback, _no_measurement)
    try:
        rate = _rate(group, place)
        states = [state for state in _C.group_states() if state["name"] == name]
    except BaseException:
        group.abort()
        raise
    group.shutdown()
    return rate, states[0]["network"], states[0]["network_source"]


def _rate(group: Any, place: int) -> float:
    size, spent, best = FIRST_BYTES, 0.0, math.inf
    whole = torch.zeros(2 * MOST_BYTES, dtype=torch.uint8)
    part = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    last = math.inf  # seconds of the last call; the first one connects the ranks
    while True:
        part[0] = _vote(spent, last, size)
        began = time.perf_counter()
        group._allgather_base(whole[: 2 * size], part[:size]).wait()
        last = time.perf_counter() - began
        spent += last
        best = min(best, last)
        votes = (int(whole[0]), int(whole[size]))
        if _STOP in votes:
            return size / best
        if votes == (_GROW, _GROW):
            size, best, last = 2 * size, math.inf, math.inf


def _vote(spent: float, last: float, size: int) -> int:
    if last < _LONG_ENOUGH and size < MOST_BYTES:
        return _GROW
    return _STOP if spent >= _ALL_SECONDS else _REPEAT


def _no_fallback(device: str, meeting: str) -> Any:
    raise RuntimeError(f"smddp doctor measures smddp alone ({device}, {meeting})")


def _no_measurement(*_: Any) -> None:
    return None
