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
from deepspeed_smddp.planning.answer import host_bytes, smddp_or_nccl
from deepspeed_smddp.planning.collective_time import RankGroup, collective_seconds
from deepspeed_smddp.planning.constants import INTERVAL, values
from deepspeed_smddp.planning.hardware import CLUSTERS, cluster
from deepspeed_smddp.planning.memory_use import fits, memory_use
from deepspeed_smddp.planning.model_shape import named
from deepspeed_smddp.planning.recommendation import (
    TOLERANCE,
    candidates,
    ds_config,
    recommended,
)
from deepspeed_smddp.planning.step_time import gemm_rate, gpu_time, step_time
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
        "together",
        "4,096",
        "smddp or NCCL not known; the times are NCCL's; measure with `smddp bench`",
        "sharding within some ranks is smddp's",
        "GPU hours",
        '"stage": 3',
        "2T tokens",
    ):
        assert part in " ".join(page.split()) or part in page
    assert max(len(line.rstrip()) for line in page.splitlines()) <= 80


def test_what_does_not_fit() -> None:
    code, page = run("gpt3-175b", "p4d", "--gpus", "64")
    assert code == 1
    assert "No configuration surely fits 64 GPUs of 42.3 GB." in page
    assert "The nearest that fits: 256 GPUs" in page


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
    assert "No full training that smddp plan knows fits, up to 4,096 GPUs of this kind." in page


def test_json() -> None:
    code, text = run("llama-2-13b", "p4d", "--gpus", "64", "--json", "-")
    assert code == 0
    found = json.loads(text)
    best = found["recommended"]
    assert found["asked"] is None
    parts = best["memory_bytes"]
    total = parts.pop("total")
    for end in ("low", "high"):
        assert total[end] == pytest.approx(sum(part[end] for part in parts.values()))
    assert total["high"] <= best["memory_of_gpu_bytes"]
    assert all(part["why"] for part in parts.values())
    assert {point["gpus"] for point in found["curve"]} >= {8, 4096}
    low, high = best["step_seconds_interval"]
    assert high / best["step_seconds"]["total"] == pytest.approx(INTERVAL)
    assert low * high == pytest.approx(best["step_seconds"]["total"] ** 2)
    assert "comm_backend" not in best["ds_config"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nollama", "p4d"], "neither a file nor a model"),
        (["llama-2-13b", "h100", "--gpus", "16"], "say with --network"),
        (["llama-2-13b", "rtx-9999"], "takes others in a file by --hardware"),
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


@pytest.mark.parametrize("gpus", [64, 512])
def test_the_recommended_config_is_valid(gpus: int) -> None:
    best = recommended(llama(gpus))
    assert best is not None
    config = ds_config(best)
    assert ("smddp" in config) == bool(best.scheme.degree)
    assert parse_section(ds_config(best.having(library="smddp"))["smddp"])
    # It plans to the same job.
    again = training_job.of_config(
        best.shape, best.cluster, best.gpus, config, recomputation=best.recomputation
    )
    assert again == best


def libraries_of_whole_shards(job: Job) -> set[str]:
    """Within some ranks only smddp shards."""
    found = {(of.software.library, of.scheme.degree > 0) for of in candidates(job)}
    assert {library for library, within in found if within} == {"smddp"}
    return {library for library, within in found if not within}


def test_no_library_is_preferred_without_a_measurement_of_both() -> None:
    job = llama(64)
    assert libraries_of_whole_shards(job) == {"nccl"}
    assert step_time(job) == step_time(job.having(library="smddp"))
    one = llama(64, cluster=job.cluster.having(measured_gbit={"smddp": 390.0}))
    assert libraries_of_whole_shards(one) == {"nccl"}
    assert smddp_or_nccl(one).startswith("not known")
    both = llama(64, cluster=job.cluster.having(measured_gbit={"smddp": 390.0, "nccl": 100.0}))
    assert libraries_of_whole_shards(both) == {"nccl", "smddp"}
    assert step_time(both.having(library="smddp")).total < step_time(both).total
    assert "smddp 390, NCCL 100 Gbit/s" in smddp_or_nccl(both)


@pytest.mark.parametrize("gbit", [1.0, 400.0, 1e6])
def test_no_gather_is_faster_than_the_link_inside_a_host(gbit: float) -> None:
    for measured in ({}, {"smddp": gbit, "nccl": gbit}):
        where = CLUSTERS["p5"].having(network_gbit=gbit, measured_gbit=measured)
        for library in ("smddp", "nccl"):
            group = RankGroup(64, 1, where, library)
            seconds = collective_seconds("all_gather", 1e9, group, values())
            assert seconds >= 1e9 * 63 / 64 / (where.gpu.link_gbps * 1e9)


def test_hardware_of_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    gpu = {"half_tflops": 50, "memory_gb": 16, "memory_gbps": 500}
    own = {"gpus": {"mine": gpu}, "clusters": {"desk": {"gpu": "mine", "gpus_per_host": 2}}}
    own["clusters"]["desk"]["network_gbit"] = 10
    path.write_text(json.dumps(own))
    of = cluster("desk", path=path)
    assert (of.gpus_per_host, of.gpu.memory_bytes, of.network_gbit) == (2, 16e9, 10)
    words = ("gpt2", "desk", "--hardware", str(path), "--gpus", "4")
    code, page = run(*words)
    assert code == 0
    assert "4 GPUs mine in 2 hosts desk, 10 Gbit/s per host" in page
    said = "no published row has GPUs mine; 10 Gbit/s per host; 2 GPUs per host"
    assert said in " ".join(page.split())
    for text, why in (
        ("{", "own.json is no table of hardware: its text: Invalid JSON"),
        (json.dumps({"gpus": {"mine": {**gpu, "memory_gb": -1}}}), "gpus.mine.memory_gb"),
        (json.dumps({"clusters": {"a": {"gpu": "b", "network_gbit": 1}}}), "has GPUs b; known are"),
    ):
        path.write_text(text)
        code, page = run(*words)
        assert code == 2
        assert why in " ".join(page.split())


def test_one_card_needs_no_network() -> None:
    code, page = run("gpt2", "rtx4090", "--gpus", "1", "--gpus-per-host", "1")
    assert code == 0
    assert "1 GPU rtx4090 in 1 host\n" in page
    code, page = run("llama-2-70b", "rtx4090", "--gpus", "1", "--gpus-per-host", "1")
    assert code == 1
    assert "with --network, several hosts are tried" in " ".join(page.split())


@pytest.mark.parametrize("gpus", [64, 512])
def test_deepspeed_reads_the_recommended_config(gpus: int) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    best = recommended(llama(gpus))
    assert best is not None
    config = ds_config(best) | {"train_batch_size": None, "gradient_accumulation_steps": None}
    read = runtime.DeepSpeedConfig(config)
    assert read.zero_config.prefetch_bucket_size == best.buckets.prefetch


def test_the_recommended_is_the_fastest_that_fits() -> None:
    job = llama(64, micro_batch=8)
    best = recommended(job)
    assert best is not None and fits(best)
    times = [step_time(found).total for found in candidates(job)]
    assert step_time(best).total <= min(times) * (1 + TOLERANCE)
    assert all(found.tokens_per_step == job.tokens_per_step for found in candidates(job))


def test_the_replica_all_reduce_overlaps_the_last_backward_pass() -> None:
    job = llama(degree=16, recomputation="full", micro_batch=4, library="smddp")
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
    job = llama(8 * hosts, where, library=library)
    faster = job.having(cluster=job.cluster.having(network_gbit=factor * job.cluster.network_gbit))
    # NCCL's kernels slow what they overlap with: hiding a second takes less than it saves.
    assert step_time(faster).total <= step_time(job).total * (1 + 1e-9)


@hypothesis.given(
    hosts=strategies.sampled_from([1, 2, 4, 16, 64]),
    name=strategies.sampled_from(["llama-2-7b", "llama-3-70b", "gpt3-175b", "mpt-30b"]),
    recomputation=strategies.sampled_from(["none", "selective", "full"]),
)
def test_more_gpus_never_need_more_memory_each(hosts: int, name: str, recomputation: str) -> None:
    job = Job(named(name), CLUSTERS["p4d"], 8 * hosts, Scheme(stage=3), recomputation=recomputation)
    more, fewer = memory_use(job.having(gpus=16 * hosts)), memory_use(job)
    assert more.low <= fewer.low and more.high <= fewer.high


# ---- parts of a step by hand


def test_frozen_matrices_have_no_gradient() -> None:
    job = Job(named("llama-2-7b"), CLUSTERS["p5"], 1, micro_batch=4, recomputation="none")
    full, lora = (gpu_time(of, values()) for of in (job, job.having(lora_rank=16)))
    gemm = 2 * 4 * 4096 * job.shape.layer_matrices / gemm_rate(job, values())
    assert lora.layer_forward == full.layer_forward
    assert full.layer_backward - lora.layer_backward == pytest.approx(gemm)
    # 4 bits are read and 16 written once in the forward pass and twice in the backward pass.
    four = gpu_time(job.having(lora_rank=16, base_bits=4), values())
    written = 2.5 * job.shape.layer_matrices / (job.cluster.gpu.memory_rate * 0.85)
    assert four.layer_forward - lora.layer_forward == pytest.approx(written)
    assert four.layer_backward - lora.layer_backward == pytest.approx(2 * written)


def test_a_token_computes_with_the_experts_that_it_takes() -> None:
    job = Job(named("mixtral-8x7b"), CLUSTERS["p5"], 8, micro_batch=8, recomputation="none")
    assert job.shape.layer_matrices == 4096 * (2 * 4096 + 2 * 1024 + 2 * 3 * 14336 + 8)
    # All eight are gathered.
    alone = job.having(gpus=64, cluster=job.cluster.having(network_gbit=1))
    dense = replace(alone, shape=replace(job.shape, experts=0, top_k=0))
    ratio = step_time(alone).exposed_gathers / step_time(dense).exposed_gathers
    assert ratio == pytest.approx(job.shape.parameters / dense.shape.parameters, rel=0.05)
    # Expert-parallel ranks exchange two experts' inputs and outputs of each token, twice.
    divided = step_time(job.having(expert=8))
    tokens = 8 * 4096
    group = RankGroup(8, 1, job.cluster, "nccl")
    once = collective_seconds("all_gather", 2 * 2 * 2 * 4096 * tokens, group, values())
    assert divided.tensor == pytest.approx(2 * 32 * once)


def test_ranks_that_share_a_sequence_share_its_work() -> None:
    job = Job(named("llama-2-7b"), CLUSTERS["p5"], 8, micro_batch=4, recomputation="none")
    whole, shared = gpu_time(job, values()), gpu_time(job.having(ulysses=4), values())
    assert whole.layer_forward / shared.layer_forward == pytest.approx(4, rel=0.1)
    assert step_time(job.having(ulysses=4)).tensor > 0


def test_zero_plus_plus_moves_fewer_bytes() -> None:
    where = CLUSTERS["p5"].having(network_gbit=1)  # all is exposed
    job = Job(named("llama-2-7b"), where, 64, Scheme(stage=3), recomputation="none")
    plain, weights, near, gradients = (
        step_time(job.having(**changes))
        for changes in (
            {},
            {"quantized_weights": True},
            {"hpz": 8},
            {"quantized_gradients": True},
        )
    )
    assert weights.exposed_gathers == pytest.approx(plain.exposed_gathers / 2, rel=0.05)
    assert near.exposed_gathers == pytest.approx(plain.exposed_gathers / 2, rel=0.05)
    assert gradients.exposed_reductions == pytest.approx(plain.exposed_reductions / 4, rel=0.05)


def test_parameters_of_the_host_are_copied() -> None:
    job = Job(named("llama-2-7b"), CLUSTERS["p5"], 1, Scheme(stage=3), recomputation="none")
    moved = job.having(offload_param="cpu")
    wire = 2 * 2 * 32 * job.shape.layer_parameters / values()["host.copy"]
    hidden_or_not = step_time(moved).exposed_gathers + step_time(moved).hidden
    assert hidden_or_not == pytest.approx(wire, rel=0.01)
    slow = step_time(job.having(offload_param="nvme"))
    assert slow.total > step_time(moved).total > step_time(job).total


def test_a_host_sends_a_layer_once_to_each_other_host() -> None:
    job = Job(named("llama-2-7b"), CLUSTERS["p5"], 64, Scheme(stage=3), recomputation="none")
    whole = 2 * job.shape.parameters * 7 / 8
    assert host_bytes(job) == pytest.approx(3 * whole)  # two gathers and a reduction
    assert host_bytes(job.having(hpz=8)) == pytest.approx(2 * whole)
    assert host_bytes(job.having(quantized_weights=True)) == pytest.approx(2 * whole)
    adapters = job.having(lora_rank=16)
    assert host_bytes(adapters) == pytest.approx(2 * whole, rel=0.01)
