"""The network of a host as ``smddp bench`` has measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from deepspeed_smddp.planning.constants import values
from deepspeed_smddp.planning.plan_error import PlanError


class _Row(BaseModel):
    op: str
    bytes: int
    backend: str
    p50_us: float


class _Run(BaseModel):
    """Keys that the planner reads; ``hosts`` has the ranks of each host."""

    hosts: dict[str, list[int]]
    wrong: list[str]
    results: list[_Row]
    device: Literal["CPU", "GPU"]


def gbit_of_host(path: Path) -> float:
    """Gbit/s of a host's NICs, one direction, of which smddp's AllGather reaches its usual share.

    The rate of the fastest size, (H - 1) / H of the output by the time, is the share
    ``smddp.network`` of it: so the planner's AllGather of large buffers takes as long as the
    measured one, and what the simulated schedule adds to its lower bound.

    Raises:
        PlanError: the file is none of ``smddp bench``, or says nothing of a network.
    """
    try:
        run = _Run.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "smddp bench --json has not written it"
        )
        raise PlanError(f"{path} can't be read: {why}") from None
    if run.wrong:
        raise PlanError(f"{path} has wrong results: {run.wrong[0]}")
    if len(run.hosts) < 2:
        raise PlanError(
            f"{path} was measured inside one host, so that it says nothing of the network: run "
            "smddp bench on ranks of several hosts"
        )
    counts = [len(ranks) for ranks in run.hosts.values()]
    foreign = 1 - min(counts) / sum(counts)
    rates = [
        foreign * row.bytes / (row.p50_us * 1e-6)
        for row in run.results
        if (row.op, row.backend) == ("all_gather", "smddp") and row.p50_us > 0
    ]
    if not rates:
        raise PlanError(f"{path} has no AllGather over smddp: measure with --ops all_gather")
    return float(f"{max(rates) * 8e-9 / values()['smddp.network']:.3g}")
