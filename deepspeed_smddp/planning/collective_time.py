"""How long collectives take: NCCL's rings, or the rate that ``smddp bench`` measured.

A ring of n ranks moves (n - 1) / n of the output over the slowest link and starts n - 1 times
(nccl-tests, PERFORMANCE.md). Between GPUs, smddp was not measured: without a measurement its
collectives count as NCCL's.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_smddp.planning.constants import Values
from deepspeed_smddp.planning.hardware import Cluster, gbit


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


def collective_seconds(
    collective: str, nbytes: float, group: RankGroup, c: Values, calls: float = 1
) -> float:
    """Seconds of a collective with an output, or of a reduction with an input, of ``nbytes``.

    An "all_reduce" is a "reduce_scatter" and an "all_gather". The bytes are moved in ``calls``
    collectives, each of which starts.
    """
    times = 2 if collective == "all_reduce" else 1
    ranks, cluster = group.ranks, group.cluster
    if ranks == 1:
        return 0.0
    rate = cluster.gpu.link_gbps * 1e9 * c["nccl.link"]
    if group.hosts > 1:
        measured = cluster.measured_gbit.get(group.library)
        usual = cluster.network_gbit * cluster.network_share / (1 + ranks / c["nccl.half_ranks"])
        sharing = min(group.spacing, cluster.gpus_per_host)
        rate = min(rate, gbit(measured or usual) / sharing)
    return times * (nbytes * (ranks - 1) / ranks / rate + calls * c["nccl.hop"] * (ranks - 1))
