"""``smddp doctor`` on emulated hosts: slow and blocked links, slow ranks, clocks are named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_smddp.diagnostics.doctor.job_doctor import FAILED
from tests.testbed import Testbed, rank_environment

MAKE = Callable[..., Testbed]
PROGRAM = Path(__file__).parent / "doctor_rank.py"
PACKAGE = Path(__file__).resolve().parents[2] / "deepspeed_smddp"


def doctor(
    bed: Testbed,
    per_host: int,
    cwd: Path,
    arguments: dict[int, list[str]],
    env: dict[int, dict[str, str]],
) -> tuple[list[int], dict[str, Any]]:
    """The statuses of all ranks and rank 0's report; some ranks have arguments or variables."""
    started = []
    for rank in range(len(bed.hosts) * per_host):
        host = bed.hosts[rank // per_host]
        variables = rank_environment(bed, host.index, rank % per_host, per_host)
        started.append(
            host.popen(
                [sys.executable, str(PROGRAM), *arguments.get(rank, [])],
                {**variables, **env.get(rank, {})},
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = [process.communicate(timeout=200) for process in started]
    statuses = [process.returncode for process in started]
    assert set(statuses) <= {0, 1, 3}, printed
    return statuses, json.loads(printed[0][0])


def by_name(report: dict[str, Any], name: str) -> list[list[int]]:
    return [row["ranks"] for row in report["deviations"] if row["name"] == name]


def text_of(report: dict[str, Any], name: str) -> str:
    return next(str(row["text"]) for row in report["deviations"] if row["name"] == name)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.testbed
def test_each_of_four_faults_is_named(testbed: MAKE, tmp_path: Path) -> None:
    """Host 2's link halved, rank 1's package changed, rank 3 without libfabric, rank 5 slowed."""
    bed = testbed(hosts=3, rate="100mbit")
    bed.set_rate(2, 0, "50mbit")
    changed = tmp_path / "changed" / PACKAGE.name
    shutil.copytree(PACKAGE, changed, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in PACKAGE.glob("*.so"):
        (changed / module.name).symlink_to(module)
    with (changed / "memory.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    shutil.copy(PACKAGE.parent / "smddp_autoload.py", changed.parent)
    arguments = {1: [f"package={changed.parent}"], 5: ["busy=3"]}
    env = {3: {"SMDDP_LIBFABRIC": str(tmp_path / "no-libfabric.so")}}
    statuses, report = doctor(bed, 2, tmp_path, arguments, env)
    assert statuses == [FAILED] * 6
    assert by_name(report, "package files") == [[1]]
    assert [3] in by_name(report, "libfabric")
    assert by_name(report, "slow host") == [[4, 5]]
    assert "host host2 (ranks 4, 5)" in text_of(report, "slow host").replace("hosts", "host")
    assert [5] in by_name(report, "slow rank")
    slow = next(row for row in report["deviations"] if row["name"] == "slow rank")
    assert "other processes" in text_of(report, "slow rank") or slow["ranks"] != [5]
    assert report["measured"]["network"] == "20,4,1.25"  # tests/conftest.py gives it
    links = report["measured"]["links"]
    assert sorted(link["hosts"] for link in links) == [
        ["host0", "host1"],
        ["host0", "host2"],
        ["host1", "host2"],
    ]
    for link in links:  # payload, which a link that was idle takes faster at first
        rate = 8 * link["bytes_per_second"]
        assert rate < (70e6 if "host2" in link["hosts"] else 110e6), links


@pytest.mark.slow
@pytest.mark.testbed
def test_a_blocked_link_another_mtu_and_a_wrong_clock_are_named(
    testbed: MAKE, tmp_path: Path
) -> None:
    bed = testbed(hosts=3, rate="200mbit")
    for here, there in ((1, 2), (2, 1)):  # frames for the other one go to no NIC: a silent drop
        wrong = [bed.hosts[there].addresses[0], "lladdr", "02:00:00:00:00:99", "dev", "eth0"]
        bed.hosts[here].run(["ip", "neigh", "replace", *wrong, "nud", "permanent"], check=True)
    bed.hosts[1].run(["ip", "link", "set", "eth0", "mtu", "1400"], check=True)
    statuses, report = doctor(bed, 1, tmp_path, {2: ["clock=3.5"]}, {})
    assert statuses == [FAILED] * 3
    assert by_name(report, "blocked link") == [[1, 2]]
    assert "hosts host1 and host2 (ranks 1 and 2)" in text_of(report, "blocked link")
    assert by_name(report, "blocked host") == []
    assert by_name(report, "MTU") == [[1]]
    assert by_name(report, "clock") == [[2]]
    assert "3.5 s ahead" in text_of(report, "clock")
    assert report["seconds"] < 60
