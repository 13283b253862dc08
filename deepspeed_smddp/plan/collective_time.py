"""How long collectives take: NCCL's rings by fitted constants, smddp by its own network model.

NCCL's ring of n ranks moves (n - 1) / n of the output over the slowest link and starts n - 1 times
(nccl-tests, PERFORMANCE.md). smddp sends each shard once to every other host, (H - 1) / H of the
output over a host's NICs, and starts once per host; its constants are those of the core's
``NetworkModel`` and are not fitted. ``all_gather`` and ``reduce_scatter`` are the seam at which a
simulation of the core's schedules can stand instead.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_smddp.plan.constants import Values
from deepspeed_smddp.plan.hardware import Cluster


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


def all_gather(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of an AllGather with an output of ``nbytes``.

    ``calls``: the output is gathered in so many collectives, each of which starts.
    """
    ranks, spacing, cluster, library = group
    if ranks == 1:
        return 0.0
    hosts = group.hosts
    if hosts == 1:
        return _inside(nbytes, ranks, cluster, c)
    # `spacing` groups share the host's NICs.
    network = cluster.network_rate / min(spacing, cluster.gpus_per_host)
    if library == "smddp":
        wire = nbytes * (hosts - 1) / hosts / (network * c["smddp.network"])
        start = c["smddp.start"] + c["smddp.start_per_host"] * (hosts - 1)
        spread = _inside(nbytes / hosts, group.local, cluster, c) if group.local > 1 else 0.0
        return calls * start + wire + spread
    kind = "efa" if cluster.efa else "nccl"
    share = c[f"{kind}.network"] / (1 + ranks / c["nccl.half_ranks"])
    rate = min(network * share, _nvlink(cluster, c))
    return nbytes * (ranks - 1) / ranks / rate + calls * c["nccl.hop"] * (ranks - 1)


def reduce_scatter(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of a ReduceScatter with an input of ``nbytes``: the mirror of an AllGather."""
    return all_gather(nbytes, group, c, calls)


def all_reduce(nbytes: float, group: RankGroup, c: Values, calls: float = 1) -> float:
    """Seconds of an AllReduce: a ReduceScatter and an AllGather."""
    return reduce_scatter(nbytes, group, c, calls) + all_gather(nbytes, group, c, calls)


def _inside(nbytes: float, ranks: int, cluster: Cluster, c: Values) -> float:
    """A ring of one host over NVLink."""
    return nbytes * (ranks - 1) / ranks / _nvlink(cluster, c) + c["nccl.start"]


def _nvlink(cluster: Cluster, c: Values) -> float:
    """Bytes per second that NCCL reaches over NVLink."""
    return cluster.gpu.nvlink_rate * c[f"nvlink.{cluster.gpu.architecture}"]
