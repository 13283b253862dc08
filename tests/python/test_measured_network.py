"""The network model that the first group between hosts measures, on links of a known rate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ranks
from tests.testbed import Testbed, start_ranks

MAKE = Callable[..., Testbed]
PROGRAM = Path(__file__).parent / "measured_network_rank.py"


def made(bed: Testbed, per_host: int, cwd: Path, curve: str | None) -> list[dict[str, Any]]:
    started = start_ranks(
        bed,
        [sys.executable, str(PROGRAM)],
        per_host,
        {"SMDDP_FABRIC_CURVE": curve, "XDG_CACHE_HOME": str(cwd)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed = [rank.communicate(timeout=100) for rank in started]
    assert all(rank.returncode == 0 for rank in started), printed
    return [json.loads(out) for out, _ in printed]


@pytest.mark.alone
@pytest.mark.testbed
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 1)])
@pytest.mark.parametrize(("rate", "expected"), [("100mbit", 0.0125), ("1gbit", 0.125)])
def test_the_rate_is_that_of_the_links(
    testbed: MAKE, tmp_path: Path, hosts: int, per_host: int, rate: str, expected: float
) -> None:
    found = made(testbed(hosts=hosts, rate=rate), per_host, tmp_path, None)
    assert len({network for rank in found for network in rank["networks"]}) == 1, found
    latency, overhead, gigabytes = map(float, found[0]["networks"][0].split(","))
    assert gigabytes == pytest.approx(expected, rel=0.25), found
    assert 1 <= latency <= 10_000
    assert 0.1 <= overhead <= 50
    print(found)


@pytest.mark.testbed
def test_numbers_that_are_given_are_not_measured(testbed: MAKE, tmp_path: Path) -> None:
    bed = testbed(hosts=2, rate="100mbit")
    for curve, used in (("default", "20,4,1.25"), ("30,5,2", "30,5,2")):
        before = bed.counters(0)[0]["tx_bytes"]
        found = made(bed, 1, tmp_path, curve)
        assert {network for rank in found for network in rank["networks"]} == {used}
        # A measurement sends 64 KiB, and then more.
        assert bed.counters(0)[0]["tx_bytes"] - before < 64 << 10
        print(found)


@pytest.mark.testbed
def test_the_next_job_takes_over_what_was_measured_on_the_same_nics(
    testbed: MAKE, tmp_path: Path
) -> None:
    bed = testbed(hosts=2, rate="100mbit")
    first = made(bed, 2, tmp_path, None)
    before = bed.counters(0)[0]["tx_bytes"]
    second = made(bed, 2, tmp_path, None)
    assert bed.counters(0)[0]["tx_bytes"] - before < 64 << 10
    assert [rank["networks"] for rank in second] == [rank["networks"] for rank in first]
    assert {source for rank in first for source in rank["sources"]} == {"measured now"}
    (source,) = {source for rank in second for source in rank["sources"]}
    assert source.startswith("measured on 20"), second
    anew = made(bed, 2, tmp_path, "measure")
    assert {source for rank in anew for source in rank["sources"]} == {"measured now"}
    # Other NICs of the same names and addresses.
    bed.close()
    others = made(testbed(hosts=2, rate="100mbit"), 2, tmp_path, None)
    assert {source for rank in others for source in rank["sources"]} == {"measured now"}


def test_all_measure_if_one_host_has_no_file(tmp_path: Path) -> None:
    """Hosts of one machine, each with a cache of its own."""

    def sources(*, remove: str = "") -> set[str]:
        if remove:
            (file,) = (tmp_path / remove / "deepspeed_smddp" / "tune").glob("network-*")
            file.unlink()
        printed = ranks.run(EMULATED.replace("FOLDER", str(tmp_path)), 4)
        return {line for text in printed for line in text.splitlines() if "measured" in line}

    assert sources() == {"measured now"}
    (recalled,) = sources()
    assert recalled.startswith("measured on 20")
    assert sources(remove="host-1") == {"measured now"}
    (recalled,) = sources()
    assert recalled.startswith("measured on 20")


EMULATED = """
    import os

    host = f"host-{int(os.environ['RANK']) // 2}"
    os.environ |= {"SMDDP_HOST_ID": host, "XDG_CACHE_HOME": f"FOLDER/{host}"}
    os.environ["SMDDP_FABRIC_CURVE"] = "auto"
    import torch.distributed as dist
    from deepspeed_smddp import group_states

    dist.init_process_group("smddp")
    print(group_states.states()[0]["network_source"])
    dist.destroy_process_group()
"""
