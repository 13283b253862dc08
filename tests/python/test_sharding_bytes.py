"""Bytes between hosts at each degree, counted on the interfaces, against MiCS' formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.line_ranks import LineRanks
from tests.testbed import Testbed

PROGRAM = Path(__file__).parent / "sharding_bytes_rank.py"
MODEL_BYTES, MICRO_STEPS = 4 * 512 * 512 * 6, 3  # as in the program


def expected(ranks: int, per_host: int, degree: int) -> float:
    """Bytes that a host sends in one step, by section 4 of MiCS (VLDB 2022).

    n = ``ranks``, k = ``per_host``, p = ``degree``, M = the model's bytes, s micro-steps. A
    hierarchical AllGather of the model within a shard group sends (p - k) M / p bytes from each
    host, twice per micro-step (forward, backward); the ReduceScatter of the gradients sends the
    same, once per micro-step. Both send nothing if the group is on one host. The AllReduce over the
    replicas, once per step, sends 2 (1 - p / n) M / p bytes from each rank.
    """
    n, k, p, m, s = ranks, per_host, degree, MODEL_BYTES, MICRO_STEPS
    within = 3 * s * max(p - k, 0) * m / p
    across = k * 2 * (1 - p / n) * m / p
    return within + across


@pytest.mark.slow
@pytest.mark.testbed
def test_bytes_between_hosts_equal_the_formula(
    testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    hosts, per_host = 2, 2
    bed = testbed(hosts=hosts, rate="10gbit", mtu=9000)
    env = {"DS_ACCELERATOR": "cpu", "SMDDP_TIMEOUT_SECONDS": "100", "SMDDP_CODING": "off"}
    ranks = LineRanks(bed, PROGRAM, per_host, tmp_path, **env)
    ranks.answers()
    steps = 4
    for degree in (4, 2):
        ranks.all("build", degree)
        before = [sent(bed, host) for host in range(hosts)]
        ranks.all("train", steps)
        for host in range(hosts):
            per_step = (sent(bed, host) - before[host]) / steps
            assert per_step == pytest.approx(
                expected(hosts * per_host, per_host, degree), rel=0.03
            ), (degree, host)
    ranks.end()


def sent(bed: Testbed, host: int) -> int:
    return sum(nic["tx_bytes"] for nic in bed.counters(host))
