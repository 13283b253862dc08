"""How long collectives take: NCCL's rings by fitted constants, smddp by simulations of the core.

NCCL's ring of n ranks moves (n - 1) / n of the output over the slowest link and starts n - 1 times
(nccl-tests, PERFORMANCE.md).

What smddp does between hosts is simulated. ``benchmarks/planner_table.py`` (``make plan-table``)
writes ``simulated_times.json``. It runs ``smddp_simulate``: the engine, the algorithms and the
selector over a network in virtual time (docs/dev/scale.md). One rank of each host is simulated,
with its rail: its share of the host's NICs (``smddp.network`` of their rate) and of the bytes.
Between the points of the table, the time divided by its lower bound is interpolated in the
logarithms of hosts, bytes of a rank's shard and rate of a rail. Beyond the most hosts, the largest
shard or the fastest rail, the bound is multiplied by the ratio of the last point.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from deepspeed_smddp.distributed import coding_gain
from deepspeed_smddp.planning.constants import Values
from deepspeed_smddp.planning.hardware import Cluster, gbit


class RankGroup(NamedTuple):
    """The ranks of a collective, and what carries it.

    ``spacing``: neighbours of the group are so many GPUs apart, 1 without tensor parallelism. The
    groups of one host that lie beside each other share its NICs. ``ratio``: the part of its bytes
    that data takes where smddp codes it between hosts (docs/coding.md); 1: it is not coded.
    """

    ranks: int
    spacing: int
    cluster: Cluster
    library: str
    ratio: float = 1.0

    @property
    def local(self) -> int:
        """Ranks of the group on one host."""
        return max(1, min(self.ranks, self.cluster.gpus_per_host // self.spacing))

    @property
    def hosts(self) -> int:
        """Hosts that the group spans."""
        return -(-self.ranks // self.local)

    @property
    def network_rate(self) -> float:
        """Bytes per second of the group's part of a host's NICs; ``spacing`` groups share them."""
        return self.cluster.network_rate / min(self.spacing, self.cluster.gpus_per_host)

    def rail(self, c: Values) -> float:
        """Bytes per second that smddp reaches of a rank's share of the NICs."""
        return self.network_rate * c["smddp.network"] / self.local


def origin(gathered: float, reduced: float, group: RankGroup, c: Values) -> str:
    """Where the times of an AllGather and a ReduceScatter of so many bytes come from, in words."""
    if group.hosts == 1:
        return "none between hosts"
    if group.library != "smddp":
        return "a formula with fitted constants"
    gathers = _one_simulated("all_gather", gathered, group, c).origin
    reductions = _one_simulated("reduce_scatter", reduced, group, c).origin
    return gathers if gathers == reductions else f"{gathers}, reductions {reductions}"


def _one_simulated(collective: str, nbytes: float, group: RankGroup, c: Values) -> Simulated:
    return simulated(collective, group.hosts, nbytes / group.ranks, group.rail(c))


def collective_seconds(
    collective: str, nbytes: float, group: RankGroup, c: Values, calls: float = 1
) -> float:
    """Seconds of a collective with an output, or of a reduction with an input, of ``nbytes``.

    An "all_reduce" is a "reduce_scatter" and an "all_gather". The bytes are moved in ``calls``
    collectives, each of which starts.
    """
    if collective == "all_reduce":
        parts = ("reduce_scatter", "all_gather")
        return sum(collective_seconds(part, nbytes, group, c, calls) for part in parts)
    ranks, cluster = group.ranks, group.cluster
    if ranks == 1:
        return 0.0
    hosts = group.hosts
    if hosts == 1:
        return _inside(nbytes, ranks, cluster, c)
    if group.library == "smddp":
        one = _one_simulated(collective, nbytes / calls, group, c)
        spread = _inside(nbytes / hosts, group.local, cluster, c) if group.local > 1 else 0.0
        coded = coding_gain.share_of_time(group.ratio, group.rail(c))
        return calls * one.seconds * coded + spread
    kind = "efa" if cluster.efa else "nccl"
    share = c[f"{kind}.network"] / (1 + ranks / c["nccl.half_ranks"])
    rate = min(group.network_rate * share, _nvlink(cluster, c))
    return nbytes * (ranks - 1) / ranks / rate + calls * c["nccl.hop"] * (ranks - 1)


def _inside(nbytes: float, ranks: int, cluster: Cluster, c: Values) -> float:
    """A ring of one host over NVLink."""
    return nbytes * (ranks - 1) / ranks / _nvlink(cluster, c) + c["nccl.start"]


def _nvlink(cluster: Cluster, c: Values) -> float:
    """Bytes per second that NCCL reaches over NVLink."""
    return cluster.gpu.nvlink_rate * c[f"nvlink.{cluster.gpu.architecture}"]


# Cells between which a point lies: index of the lower one, and the share of the upper one.
_Place = tuple[int, float]


class SimulatedTimes(BaseModel):
    """The table. ``microseconds``: by collective, rate, hosts and shard; None: not simulated.

    ``gbit`` is of a rail, one direction; ``shard_bytes`` of one rank's part of an AllGather's
    output or of a ReduceScatter's input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    made_by: str
    version: str
    commit: str
    latency_us: float
    message_us: float
    gbit: tuple[float, ...]
    hosts: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    microseconds: dict[str, tuple[tuple[tuple[float | None, ...], ...], ...]]

    def bound(self, hosts: int, shard: float, rate: float) -> float:
        """Seconds of one latency, and of other hosts' shards once over a rail of that rate."""
        return self.latency_us * 1e-6 + shard * (hosts - 1) / rate


class Simulated(NamedTuple):
    """A time, and whether it is "simulated" or "extended from" which hosts, shard or rate."""

    seconds: float
    origin: str


@cache
def table() -> SimulatedTimes:
    """The table of the package."""
    file = resources.files("deepspeed_smddp.planning").joinpath("simulated_times.json")
    return SimulatedTimes.model_validate_json(file.read_text("utf-8"))


@cache
def simulated(collective: str, hosts: int, shard: float, rate: float) -> Simulated:
    """The time of an "all_gather" or a "reduce_scatter" between ``hosts`` hosts, at least 2.

    ``shard``: bytes of a rank. ``rate``: bytes per second of its rail, one direction.
    """
    of = table()
    ratios = _log_ratios(collective)
    r, h = _place(of.gbit, rate / gbit(1)), _place(of.hosts, hosts)
    s = _place(of.shard_bytes, shard)
    log_ratio = _between(r, lambda i: _between(h, lambda j: _between(s, lambda k: ratios[i][j][k])))
    seconds = math.exp(log_ratio) * of.bound(hosts, shard, rate)
    return Simulated(seconds, _origin(collective, hosts, shard, rate))


def _origin(collective: str, hosts: int, shard: float, rate: float) -> str:
    of = table()
    above = min(bisect_left(of.shard_bytes, shard), len(of.shard_bytes) - 1)
    some = of.microseconds[collective][0]
    most = max(n for n, row in zip(of.hosts, some, strict=True) if row[above] is not None)
    if hosts > most:
        return f"extended from {most} hosts"
    if shard > of.shard_bytes[-1]:
        return f"extended from shards of {of.shard_bytes[-1] >> 20} MiB"
    fastest = of.gbit[-1]
    return f"extended from {fastest:g} Gbit/s" if rate > gbit(fastest) * 1.001 else "simulated"


@cache
def _log_ratios(collective: str) -> list[list[list[float]]]:
    """Logarithms of time by bound; those not simulated have the ratio of the hosts before them."""
    of = table()
    found = []
    for rate, by_hosts in zip(of.gbit, of.microseconds[collective], strict=True):
        rows: list[list[float]] = []
        for hosts, times in zip(of.hosts, by_hosts, strict=True):
            row = []
            for k, (shard, time) in enumerate(zip(of.shard_bytes, times, strict=True)):
                if time is None:
                    row.append(rows[-1][k])
                else:
                    row.append(math.log(time * 1e-6 / of.bound(hosts, shard, gbit(rate))))
            rows.append(row)
        found.append(rows)
    return found


def _place(points: Sequence[float], value: float) -> _Place:
    """Where ``value`` lies among ascending points, by logarithms; outside them at the nearest."""
    if value <= points[0]:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 2, 1.0
    i = bisect_right(points, value) - 1
    return i, math.log(value / points[i]) / math.log(points[i + 1] / points[i])


def _between(place: _Place, at: Callable[[int], float]) -> float:
    i, share = place
    return at(i) * (1 - share) + at(i + 1) * share
