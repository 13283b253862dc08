"""How long collectives take: NCCL's rings by fitted constants, smddp by simulations of the core.

NCCL's ring of n ranks moves (n - 1) / n of the output over the slowest link and starts n - 1 times
(nccl-tests, PERFORMANCE.md). What smddp does between hosts is simulated: ``simulated_time`` has the
times of one rail, whose rate is the share ``smddp.network`` of the NICs' rate.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_smddp.planning.constants import Values
from deepspeed_smddp.planning.hardware import Cluster
from deepspeed_smddp.planning.simulated_time import Simulated, simulated


class RankGroup(NamedTuple):
    """The ranks of a collective, and what carries it.

    ``spacing``: neighbours of the group are so many GPUs apart, 1 without tensor parallelism. The
    groups of one host that lie beside each other share its NICs.
    """

    ranks: int
    spacing: int
    cluster: Cluster
    library: str

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


def all_gather(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of an AllGather with an output of ``nbytes``.

    ``calls``: the output is gathered in so many collectives, each of which starts.
    """
    return _collective("all_gather", nbytes, group, c, calls)


def reduce_scatter(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of a ReduceScatter with an input of ``nbytes``."""
    return _collective("reduce_scatter", nbytes, group, c, calls)


def all_reduce(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of an AllReduce: a ReduceScatter and an AllGather."""
    return reduce_scatter(nbytes, group, c, calls) + all_gather(nbytes, group, c, calls)


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
    rail = group.network_rate * c["smddp.network"] / group.local
    return simulated(collective, group.hosts, nbytes / group.ranks, rail)


def _collective(collective: str, nbytes: float, group: RankGroup, c: Values, calls: float) -> float:
    ranks, _, cluster, library = group
    if ranks == 1:
        return 0.0
    hosts = group.hosts
    if hosts == 1:
        return _inside(nbytes, ranks, cluster, c)
    if library == "smddp":
        one = _one_simulated(collective, nbytes / calls, group, c)
        spread = _inside(nbytes / hosts, group.local, cluster, c) if group.local > 1 else 0.0
        return calls * one.seconds + spread
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
