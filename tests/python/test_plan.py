"""``smddp plan``: the page, JSON, exit codes, sentences; what is recommended fits and is valid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies
from typer.testing import CliRunner

from deepspeed_smddp.commands.main import app
from deepspeed_smddp.config.parsing import parse_section
from deepspeed_smddp.planning import training_job
from deepspeed_smddp.planning.hardware import CLUSTERS, gbit
from deepspeed_smddp.planning.memory_use import fits, memory_use
from deepspeed_smddp.planning.model_shape import named
from deepspeed_smddp.planning.recommendation import (
    TOLERANCE,
    candidates,
    ds_config,
    recommended,
)
from deepspeed_smddp.planning.step_time import step_time
from deepspeed_smddp.planning.training_job import Job, Scheme


def llama(gpus: int = 512, where: str = "p4d", **changes: object) -> Job:
    job = Job(named("llama-2-13b"), CLUSTERS[where], gpus, micro_batch=2)
    return job.having(**changes)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_the_page_of_llama_on_64_p4d() -> None:
    code, page = run("llama-2-13b", "p4d", "--gpus", "512", "--tokens", "2T", "--price", "20")
    assert code == 0
    for part in (
        "512 GPUs",
        "64 hosts p4d",
        "Memory of a GPU",
        "hidden communication",
        "4096",
        "GPU hours",
        '"comm_backend": "smddp"',
        "2T tokens",
    ):
        assert part in " ".join(page.split()) or part in page
    assert max(len(line.rstrip()) for line in page.splitlines()) <= 80


def test_what_does_not_fit() -> None:
    code, page = run("gpt3-175b", "p4d", "--gpus", "64")
    assert code == 1
    assert "No configuration fits 64 GPUs of 40.0 GB." in page
    assert "The nearest that fits: 128 GPUs" in page


def test_nothing_fits() -> None:
    code, page = run(
        "layers=200,hidden=65536,heads=512,ffn=262144,vocabulary=51200,sequence=65536",
        "a100-40",
        "--network",
        "100",
        "--gpus",
        "8",
    )
    assert code == 1
    assert "Nothing that smddp plan knows fits, up to 4,096 GPUs of this kind." in page


def test_json() -> None:
    code, text = run("llama-2-13b", "p4d", "--gpus", "64", "--json", "-")
    assert code == 0
    found = json.loads(text)
    best = found["recommended"]
    assert found["asked"] is None
    parts = best["memory_bytes"]
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))
    assert parts["total"] <= best["memory_of_gpu_bytes"]
    assert {point["gpus"] for point in found["curve"]} >= {8, 4096}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nollama", "p4d"], "neither a file nor a model"),
        (["llama-2-13b", "h100"], "say with --network"),
        (["llama-2-13b", "p4d", "--gpus", "12"], "do not fill hosts of 8"),
        (["llama-2-13b", "p4d", "--tokens", "many"], "--tokens is 'many'; it is a number"),
        (["layers=4,hiden=5", "p4d"], "a model has no 'hiden'"),
        (["llama-2-13b", "p4d", "--recomputation", "some"], "'some' is not one of"),
    ],
)
def test_wrong_questions(words: list[str], sentence: str) -> None:
    code, page = run(*words)
    assert code == 2
    assert sentence in " ".join(page.split())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "neither JSON nor hjson with an object in it"),
        ('{"zero_optimization": {"stage": 7}}', "the ZeRO stage is 7"),
        ('{"smddp": {"allgather_buket_size": 5}}', "allgather_bucket_size"),
    ],
)
def test_wrong_configs(tmp_path: Path, text: str, sentence: str) -> None:
    config = tmp_path / "ds.json"
    config.write_text(text)
    code, page = run("llama-2-13b", "p4d", "--config", str(config))
    assert code == 2
    assert sentence in " ".join(page.split())


def test_the_recommended_config_is_valid() -> None:
    best = recommended(llama(64))
    assert best is not None
    config = ds_config(best)
    assert parse_section(config["smddp"])
    # It plans to the same job.
    again = training_job.of_config(
        best.shape, best.cluster, best.gpus, config, recomputation=best.recomputation
    )
    assert again == best.having(coded=True)


def test_coding_counts_where_the_network_is_slow_enough_for_it() -> None:
    def gathers(gbit_per_host: float, **changes: object) -> float:
        of = replace(CLUSTERS["p4d"], network_rate=gbit(gbit_per_host))
        return step_time(llama(64, cluster=of, **changes)).exposed_gathers

    # 9 Gbit/s of a host are 1.01 of each of its 8 ranks.
    assert gathers(9, coded=True) < 0.75 * gathers(9)
    assert gathers(400, coded=True) == gathers(400)
    for other in ({"precision": "fp16"}, {"gradient_bytes": 4}, {"library": "nccl"}):
        assert gathers(9, coded=True, **other) == gathers(9, **other)


@pytest.mark.parametrize(
    ("network", "setting", "said"),
    [
        (
            "25",
            "auto",
            "Coding 0.71 of the bytes of bf16 (assumed): a rank has 2.81 Gbit/s",
        ),
        ("400", "auto", "Coding not counted: a rank has 45 Gbit/s, it pays up to 12.9 Gbit/s"),
        ("25", "off", "Coding off, or of a type without a known ratio"),
    ],
)
def test_the_page_says_what_is_assumed_of_coding(
    tmp_path: Path, network: str, setting: str, said: str
) -> None:
    config = {"comm_backend": "smddp", "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "smddp": {"coding": setting}}))
    words = ("llama-2-7b", "a100-80", "--gpus", "64", "--network", network)
    _, page = run(*words, "--config", str(tmp_path / "ds.json"))
    assert said in " ".join(page.split())


def test_deepspeed_reads_the_recommended_config() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.zero.config")
    best = recommended(llama(64))
    assert best is not None
    zero = runtime.DeepSpeedZeroConfig(**ds_config(best)["zero_optimization"])
    assert zero.prefetch_bucket_size == best.buckets.prefetch


def test_the_recommended_is_the_fastest_that_fits() -> None:
    job = llama(64, micro_batch=8)
    best = recommended(job)
    assert best is not None and fits(best)
    times = [step_time(found).total for found in candidates(job)]
    assert step_time(best).total <= min(times) * (1 + TOLERANCE)
    assert {found.software.library for found in candidates(job)} == {"smddp", "nccl"}
    assert all(found.tokens_per_step == job.tokens_per_step for found in candidates(job))


def test_the_replica_all_reduce_overlaps_the_last_backward_pass() -> None:
    job = llama(degree=16, recomputation="full", micro_batch=4)
    at_the_step = replace(job.buckets, reduce=job.shape.parameters)  # one bucket, full at the end
    by_bucket = replace(job.buckets, reduce=50_000_000)

    def gain(of: Job) -> float:
        late = step_time(of.having(buckets=at_the_step))
        early = step_time(of.having(buckets=by_bucket))
        assert early.exposed_gathers == pytest.approx(late.exposed_gathers)
        return early.hidden - late.hidden

    assert gain(job) > 0.05 * step_time(job).exposed_reductions
    # Once per step, however many micro-steps there are.
    assert gain(job.having(accumulation=4)) == pytest.approx(gain(job))
    assert gain(job.having(offload=True)) == 0
    assert gain(job.having(overlapped=False)) == 0
    assert gain(job.having(library="nccl")) == 0
    assert gain(job.having(degree=0)) == 0


@hypothesis.given(
    hosts=strategies.sampled_from([2, 4, 16, 64, 512]),
    library=strategies.sampled_from(["smddp", "nccl"]),
    factor=strategies.floats(1.0, 16.0),
    where=strategies.sampled_from(sorted(CLUSTERS)),
)
def test_a_faster_network_is_never_slower(
    hosts: int, library: str, factor: float, where: str
) -> None:
    job = llama(8 * hosts, where, library=library, coded=True)
    faster = job.having(
        cluster=replace(job.cluster, network_rate=factor * job.cluster.network_rate)
    )
    # NCCL's kernels slow what they overlap with: hiding a second takes less than it saves.
    assert step_time(faster).total <= step_time(job).total * (1 + 1e-9)


@hypothesis.given(
    hosts=strategies.sampled_from([1, 2, 4, 16, 64]),
    name=strategies.sampled_from(["llama-2-7b", "llama-3-70b", "gpt3-175b", "mpt-30b"]),
    recomputation=strategies.sampled_from(["none", "selective", "full"]),
)
def test_more_gpus_never_need_more_memory_each(hosts: int, name: str, recomputation: str) -> None:
    job = Job(named(name), CLUSTERS["p4d"], 8 * hosts, Scheme(stage=3), recomputation=recomputation)
    assert memory_use(job.having(gpus=16 * hosts)).total <= memory_use(job).total
