"""``smddp doctor`` over the ranks of a job: what deviates is named, and one status for all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic_core import to_json
from rich.console import Console
from typer.testing import CliRunner

import ranks
from deepspeed_smddp.commands.main import app
from deepspeed_smddp.diagnostics.doctor import facts, job_doctor, machine, rank_facts
from deepspeed_smddp.diagnostics.doctor.facts import Fact, Finding, RankFacts, Verdict
from deepspeed_smddp.diagnostics.doctor.job_doctor import FAILED, LIMITED, WELL, JobReport

IMPORTS = """
import torch
from deepspeed_smddp.diagnostics.doctor import job_doctor
from deepspeed_smddp.diagnostics.output_files import STANDARD_OUTPUT
"""


def doctor(deviation: str = "", size: int = 3) -> tuple[list[int], dict[str, Any]]:
    """The statuses of all ranks, and rank 0's report, after rank 1 has run ``deviation``."""
    program = "import os\nif os.environ['RANK'] == '1':\n"
    program += "".join(f"    {line}\n" for line in (deviation or "pass").splitlines())
    program += "print('\\nstatus', job_doctor.run(None, STANDARD_OUTPUT, 60.0, measure=False))\n"
    printed = ranks.run(program, size, timeout=120, imports=IMPORTS)
    statuses = [int(text.rpartition("status ")[2]) for text in printed]
    text = printed[0]
    report = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return statuses, report


def test_ranks_that_deviate_are_named() -> None:
    statuses, report = doctor(
        "import resource\n"
        "from deepspeed_smddp.diagnostics.doctor import rank_facts\n"
        "os.environ['SMDDP_FALLBACK'] = 'error'\n"
        "os.environ['NCCL_PROTO'] = 'Simple'\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (777, 777))\n"
        "rank_facts.package_hash = lambda: 'another'\n"
    )
    found = {row["name"]: row for row in report["deviations"]}
    assert statuses == [FAILED] * 3
    assert all(row["ranks"] == [1] for row in found.values()), found
    assert found["package files"]["verdict"] == "failed"
    assert "rank 1 (host" in found["package files"]["text"]
    assert "another; the others: " in found["package files"]["text"]
    assert "error (SMDDP_FALLBACK); the others: warn (default)" in found["fallback"]["text"]
    assert "Simple (environment); the others: not set" in found["NCCL_PROTO"]["text"]
    limits = [row["text"] for row in report["deviations"] if row["name"] == "descriptor limit"]
    assert any("777; the others" in text for text in limits)
    assert any("ulimit -n" in text for text in limits)


def test_equal_ranks_and_a_rank_that_does_not_come() -> None:
    statuses, report = doctor()
    assert statuses == [WELL] * 3 and report["deviations"] == []
    missing = "import os\nif os.environ['RANK'] != '1':\n"
    missing += "    print('\\nstatus', job_doctor.run(None, STANDARD_OUTPUT, 3.0, measure=False))\n"
    printed = ranks.run(missing, 3, timeout=120, imports=IMPORTS)
    assert "rank 1 did not answer within 3 s" in printed[0]
    assert "status 1" in printed[0] and "status 1" in printed[2]


# ---- the comparison alone


def rank(number: int, host: str, *facts: Fact, problems: list[Finding] | None = None) -> RankFacts:
    return RankFacts(number, host, host, number % 2, list(facts), problems or [])


def test_the_smaller_group_is_named_by_host_where_it_is_a_whole_host() -> None:
    job = [rank(r, "ab"[r // 2], Fact("MTU", "1500" if r < 2 else "9001")) for r in range(4)]
    (even,) = facts.deviations(job)
    assert even.text == "host a (ranks 0, 1): 1500; host b (ranks 2, 3): 9001"
    job.append(rank(4, "c", Fact("MTU", "1500")))
    (most,) = facts.deviations(job)
    assert most.text == "host b (ranks 2, 3): 9001; the others: 1500" and most.ranks == (2, 3)


def test_hosts_may_differ_in_what_is_their_own() -> None:
    job = [rank(r, "ab"[r // 2], Fact("X", "ab"[r // 2], scope="host")) for r in range(4)]
    assert facts.deviations(job) == []
    job[3] = rank(3, "b", Fact("X", "c", scope="host"))
    (found,) = facts.deviations(job)
    assert "rank 3 (host b): c" in found.text


def test_a_problem_is_not_said_again_as_a_difference() -> None:
    missing = [Finding("libfabric", "not found", Verdict.LIMITED)]
    job = [rank(0, "a", Fact("libfabric", "tcp")), rank(1, "a", problems=missing)]
    (found,) = facts.deviations(job)
    assert found.text == "rank 1 (host a): not found"


def test_facts_survive_json() -> None:
    job = rank(3, "b", Fact("a", "1", "host", Verdict.FAILED, "x"), problems=[Finding("f", "t")])
    assert TypeAdapter(RankFacts).validate_json(to_json(job)) == job


def test_the_page_fits_80_columns() -> None:
    fact = Fact("torch", "2.13.0", if_different=Verdict.FAILED)
    job = [rank(r, f"a-host-with-a-long-name-{r // 8}", fact) for r in range(64)]
    other = Fact("torch", "x" * 200, if_different=Verdict.FAILED)
    job[9] = rank(9, "a-host-with-a-long-name-1", other)
    report = JobReport(64, job, facts.deviations(job))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(job_doctor.page(report), width=job_doctor.WIDTH)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= job_doctor.WIDTH
    assert "rank 9" in text and "1 failed, 0 limited" in text and report.status == FAILED


# ---- the facts alone


def test_a_changed_file_of_the_package_changes_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one = 1\n")
    before = rank_facts.package_hash(tmp_path)
    assert rank_facts.package_hash(tmp_path) == before
    (tmp_path / "a.py").write_text("one = 2\n")
    assert rank_facts.package_hash(tmp_path) != before


def device(sysfs: Path, name: str, driver: str, node: int) -> None:
    folder = sysfs / "class/infiniband" / name
    (folder / "ports/1").mkdir(parents=True)
    (folder / "ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    (folder / "device").mkdir()
    (folder / "device/numa_node").write_text(f"{node}\n")
    target = sysfs / "bus/pci/drivers" / driver
    target.mkdir(parents=True, exist_ok=True)
    (folder / "device/driver").symlink_to(target)


def test_efa_that_is_not_used_is_said(tmp_path: Path) -> None:
    assert list(machine.network_findings("tcp;ofi_rxm", tmp_path)) == []
    device(tmp_path, "rdmap0", "efa", 0)
    (found,) = machine.network_findings("tcp;ofi_rxm", tmp_path)
    assert found.verdict is Verdict.LIMITED and "present (1 device) but not used" in found.text
    assert list(machine.network_findings("efa", tmp_path)) == []
    assert machine.rdma_devices(tmp_path) == ["rdmap0 (efa) 100 Gb/sec"]


def test_a_rank_far_from_its_gpu_and_its_nics_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in enumerate(("0-1", "2-3")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus)
        gpu = tmp_path / f"bus/pci/devices/0000:0{node}:00.0"
        gpu.mkdir(parents=True)
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(node))):
            (gpu / name).write_text(text)
    device(tmp_path, "mlx5_0", "mlx5_core", 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    named = {fact.name: fact.value for fact in machine.machine_facts(tmp_path)}
    assert named["NICs near the GPU"] == "none"
    assert (
        "no NIC" in {f.name: f.text for f in machine.machine_findings(tmp_path)}["NICs of the GPU"]
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    named = {fact.name: fact.value for fact in machine.machine_facts(tmp_path)}
    assert named["NICs near the GPU"] == "mlx5_0"
    assert "NICs of the GPU" not in {f.name for f in machine.machine_findings(tmp_path)}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = {f.name: f.text for f in machine.machine_findings(tmp_path)}
    assert (
        "NUMA node 0" in found["GPU affinity"]
        and "numactl --cpunodebind=1" in found["GPU affinity"]
    )
    assert "mlx5_0" in found["NIC affinity"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    names = {f.name for f in machine.machine_findings(tmp_path)}
    assert "GPU affinity" not in names and "NIC affinity" not in names


def test_a_limited_finding_alone_gives_its_own_status() -> None:
    job = [rank(r, "a", problems=[Finding("x", "y", Verdict.LIMITED)]) for r in range(2)]
    assert JobReport(2, job, facts.deviations(job)).status == LIMITED


# ---- one process, and a config


def check(path: Path, **config: Any) -> tuple[int, str]:
    """The exit status for a config, and the page as a pipe has it."""
    path.write_text(json.dumps(config))
    answer = CliRunner().invoke(app, ["doctor", "--config", str(path)])
    return answer.exit_code, " ".join(answer.output.split())


SMDDP = {"comm_backend": "smddp", "zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("config", "verdict", "said"),
    [
        ({**SMDDP, "smdpp": {}}, "failed", '"smdpp" has no effect: did you mean "smddp"?'),
        ({"smddp": {"fallback": "error"}}, "failed", 'the section "smddp" has no effect'),
        ({"zero_optimization": {"stage": 3}}, "limited", "the job does not use smddp"),
        (
            {"comm_backend": "smddp", "smddp": {"sharded_data_parallel_degree": 2}},
            "failed",
            'needs "zero_optimization.stage": 3',
        ),
        (
            {
                **SMDDP,
                "smddp": {"sharded_data_parallel_degree": 2},
                "zero_optimization": {"stage": 3, "mics_shard_size": 2},
            },
            "failed",
            'does not go with "zero_optimization.mics_shard_size"',
        ),
        (
            {**SMDDP, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "limited",
            "smddp gathers the quantized weights of a bucket as one tensor",
        ),
    ],
)
def test_what_is_wrong_with_a_config(
    tmp_path: Path, config: dict[str, Any], verdict: str, said: str
) -> None:
    status, page = check(tmp_path / "ds.json", **config)
    assert status == (FAILED if verdict == "failed" else WELL)
    assert said in page, page
    _, well = check(tmp_path / "well.json", **SMDDP)
    count = {
        name: 0 if "Nothing" in well else int(re.search(rf"(\d+) {name}", well)[1])
        for name in ("failed", "limited")
    }
    count[verdict] += 1
    assert page.endswith(f"{count['failed']} failed, {count['limited']} limited.")


def test_a_config_in_order_is_a_short_page_with_whole_names(tmp_path: Path) -> None:
    smddp = {"sharded_data_parallel_degree": 2, "reduce_scatter_bucket_size": 123456789}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**SMDDP, "smddp": smddp}))
    page = CliRunner().invoke(app, ["doctor", "--config", str(path)]).output
    assert len(page.splitlines()) < 80, page
    assert all(f"{key} " in page and str(value) in page for key, value in smddp.items()), page
    assert "settings have their defaults" in page and "timeout_seconds" not in page
