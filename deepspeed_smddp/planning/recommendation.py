"""What to change: the fastest configuration that fits and its DeepSpeed config; single changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_smddp.planning import PlanError
from deepspeed_smddp.planning.memory_use import fits
from deepspeed_smddp.planning.step_time import step_time
from deepspeed_smddp.planning.training_job import Buckets, Job, Scheme, Software

# Of two configurations that are so close, the simpler one: the model is not surer than that.
TOLERANCE = 0.05
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TENSOR = (1, 2, 4, 8)
MOST_GPUS = 4096


@dataclass(frozen=True)
class Change:
    """One change of a job: what it is, and the seconds of its step with it."""

    text: str
    seconds: float
    fits: bool


def candidates(job: Job) -> Iterator[Job]:
    """Configurations with the same model, GPUs and batch, that fit: ZeRO-3, sharding degrees,
    tensor parallelism, micro-batches, recomputation; both libraries if both were measured."""
    samples = job.micro_batch * job.accumulation * job.data_parallel
    for tensor in _TENSOR:
        for degree in _degrees(job, tensor):
            # DeepSpeed itself no longer shards by degree: MiCS was removed in 0.19.
            for library in ["smddp"] if degree else _libraries(job):
                for recomputation in ("none", "full"):
                    for micro in _MICRO_BATCHES:
                        found = _settled(job, samples, tensor, degree, micro)
                        if found is not None:
                            found = found.having(library=library, recomputation=recomputation)
                            if fits(found):
                                yield found


def recommended(job: Job) -> Job | None:
    """The fastest that fits, or a simpler one within ``TOLERANCE`` of it; None if none fits."""
    timed = [(step_time(found).total, found) for found in candidates(job)]
    if not timed:
        return None
    best = min(seconds for seconds, _ in timed)
    near = [(s, found) for s, found in timed if s <= best * (1 + TOLERANCE)]
    return min(near, key=lambda of: (_complexity(of[1]), of[0]))[1]


def nearest_that_fits(job: Job) -> Job | None:
    """For a job that does not fit: the fastest that does with the fewest changes of it.

    On the same GPUs if there is one, else on twice as many and so on, up to 4,096.
    """
    found = [(_distance(job, other), step_time(other).total, other) for other in candidates(job)]
    if found:
        return min(found, key=lambda of: of[:2])[2]
    samples = job.micro_batch * job.accumulation * job.data_parallel
    parts = job.scheme.tensor * job.scheme.pipeline
    gpus = job.gpus * 2
    while gpus <= MOST_GPUS:
        each = max(1, samples * parts // gpus)
        try:
            more = recommended(job.having(gpus=gpus, degree=0, micro_batch=1, accumulation=each))
        except PlanError:
            more = None
        if more is not None:
            return more
        gpus *= 2
    return None


def single_changes(job: Job) -> list[Change]:
    """What each single change would bring, the fastest first."""
    found: dict[str, Job] = {}
    samples = job.micro_batch * job.accumulation * job.data_parallel
    for other in set(_libraries(job)) - {job.software.library}:
        name = "NCCL" if other == "nccl" else other
        found[f"{name} for the collectives"] = job.having(library=other)
    for recomputation in ("none", "full"):
        if recomputation != job.recomputation:
            text = "recompute all activations" if recomputation == "full" else "no recomputation"
            found[text] = job.having(recomputation=recomputation)
    for micro in _MICRO_BATCHES:
        if micro in (job.micro_batch * 2, job.micro_batch // 2):
            again = _settled(job, samples, job.scheme.tensor, job.scheme.degree, micro)
            if again is not None:
                found[f"micro-batch {micro}"] = again
    if job.scheme.stage == 3:
        for degree in _degrees(job, job.scheme.tensor):
            if degree != job.scheme.degree:
                found[f"state sharded over {degree or 'all'} ranks"] = job.having(degree=degree)
    for tensor in _TENSOR:
        if tensor != job.scheme.tensor:
            again = _settled(job, samples, tensor, 0, job.micro_batch)
            if again is not None:
                found[f"tensor parallelism {tensor}"] = again
    if job.hosts > 1:
        fast = job.cluster.having(
            network_gbit=2 * job.cluster.network_gbit,
            measured_gbit={name: 2 * rate for name, rate in job.cluster.measured_gbit.items()},
        )
        found["twice the network"] = job.having(cluster=fast)
    changes = [Change(t, step_time(j).total, fits(j)) for t, j in found.items()]
    return sorted(changes, key=lambda change: change.seconds)


def _libraries(job: Job) -> list[str]:
    """Both where both were measured, else the job's: the other has no time of its own."""
    measured = list(job.cluster.measured_gbit)
    return measured if len(measured) > 1 else [job.software.library]


def _degrees(job: Job, tensor: int) -> list[int]:
    """0 (all ranks), and whole hosts in powers of two."""
    ranks = job.gpus // (tensor * job.scheme.pipeline)
    degree = max(1, job.cluster.gpus_per_host // tensor)
    found = [0]
    while degree < ranks:
        if ranks % degree == 0 and degree > 1:
            found.append(degree)
        degree *= 2
    return found


def _settled(job: Job, samples: int, tensor: int, degree: int, micro: int) -> Job | None:
    """The job with these values and the same batch; None if that can't be."""
    parts = tensor * job.scheme.pipeline
    if job.gpus % parts or tensor > job.cluster.gpus_per_host:
        return None
    ranks = job.gpus // parts
    if samples % (ranks * micro):
        return None
    layer = -(-job.shape.layer_parameters // tensor)
    try:
        return job.having(
            stage=3,
            tensor=tensor,
            degree=degree,
            micro_batch=micro,
            accumulation=samples // (ranks * micro),
            # The next layer is gathered while one computes.
            buckets=Buckets(prefetch=layer, reduce=layer, max_live=3 * layer),
        )
    except PlanError:
        return None


def _complexity(job: Job) -> tuple[int, int, int, int]:
    scheme = job.scheme
    return (
        scheme.tensor,
        job.accumulation,
        int(scheme.degree > 0),
        int(job.recomputation != "full"),
    )


def _distance(asked: Job, other: Job) -> int:
    changed = (
        asked.scheme.stage != other.scheme.stage,
        asked.scheme.tensor != other.scheme.tensor,
        asked.scheme.degree != other.scheme.degree,
        asked.software.library != other.software.library,
        asked.recomputation != other.recomputation,
        asked.micro_batch != other.micro_batch,
    )
    return sum(changed)


def ds_config(job: Job) -> dict[str, Any]:
    """The config, ready to save as JSON; learning rate and paths of NVMe are the user's to set.

    ``training_job.of_config`` makes the same job of it.
    """
    scheme, software = job.scheme, job.software
    config: dict[str, Any] = {}
    if software.library == "smddp":
        config["comm_backend"] = "smddp"
        section: dict[str, Any] = {
            "allgather_bucket_size": "auto",
            "reduce_scatter_bucket_size": "auto",
        }
        if scheme.degree:
            section["sharded_data_parallel_degree"] = scheme.degree
        config["smddp"] = section
    config |= {
        "train_batch_size": job.micro_batch * job.accumulation * job.data_parallel,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        **_precision(software),
    }
    if software.fused_optimizer:
        config["optimizer"] = {"type": software.optimizer}
        if software.momentum:
            config["optimizer"]["params"] = {"momentum": 0.9}
    for key, value in (
        ("tensor_parallel", {"autotp_size": scheme.tensor} if scheme.tensor > 1 else None),
        ("pipe_parallel_size", scheme.pipeline if scheme.pipeline > 1 else None),
        ("sequence_parallel_size", scheme.ulysses if scheme.ulysses > 1 else None),
        ("expert_parallel", {"autoep_size": scheme.expert} if scheme.expert > 1 else None),
        ("data_types", {"grad_accum_dtype": "fp32"} if software.fp32_accumulation else None),
        ("activation_checkpointing", _activations(scheme)),
    ):
        if value:
            config[key] = value
    config["zero_optimization"] = _zero(job)
    return config


def _precision(software: Software) -> dict[str, Any]:
    if software.precision == "fp32":
        return {"bf16": {"enabled": False}}
    narrow = "fp16" if software.precision == "fp16" else "bf16"
    section: dict[str, Any] = {"enabled": True}
    if software.master_bytes == 2:
        section[f"{narrow}_master_weights_and_grads"] = True
    if software.state_bytes == 2:
        section["bf16_optimizer_states"] = True
    return {narrow: section}


def _activations(scheme: Scheme) -> dict[str, bool]:
    found = {
        "partition_activations": scheme.partition_activations,
        "cpu_checkpointing": scheme.offload_activations,
    }
    return {key: value for key, value in found.items() if value}


def _zero(job: Job) -> dict[str, Any]:
    scheme = job.scheme
    zero: dict[str, Any] = {
        "stage": scheme.stage,
        "overlap_comm": scheme.stage == 3 or job.software.overlap_comm,
        "contiguous_gradients": job.software.contiguous_gradients,
        "reduce_bucket_size": job.buckets.reduce,
    }
    if job.buckets.sub_group != Buckets.sub_group:
        zero["sub_group_size"] = job.buckets.sub_group
    if scheme.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": job.buckets.prefetch,
            "stage3_param_persistence_threshold": job.buckets.persistence,
            "stage3_max_live_parameters": job.buckets.max_live,
        }
        if job.buckets.max_reuse != Buckets.max_reuse:
            zero["stage3_max_reuse_distance"] = job.buckets.max_reuse
        if scheme.degree and job.software.library != "smddp":
            zero["mics_shard_size"] = scheme.degree
        zero |= {
            key: value
            for key, value in (
                ("zero_hpz_partition_size", scheme.hpz),
                ("zero_quantized_weights", scheme.quantized_weights),
                ("zero_quantized_gradients", scheme.quantized_gradients),
            )
            if value > 1 or value is True
        }
    pages = {} if scheme.pin_memory else {"pin_memory": False}
    if scheme.offload:
        zero["offload_optimizer"] = {"device": "nvme" if scheme.nvme_optimizer else "cpu", **pages}
        if scheme.offload_ratio < 1:
            zero["offload_optimizer"]["ratio"] = scheme.offload_ratio
        if scheme.optimizer_buffers != Scheme.optimizer_buffers:
            zero["offload_optimizer"]["buffer_count"] = scheme.optimizer_buffers
    if scheme.offload_param:
        zero["offload_param"] = {"device": scheme.offload_param, **pages}
        if scheme.param_buffers != Scheme.param_buffers:
            zero["offload_param"] |= {"buffer_count": 1, "buffer_size": scheme.param_buffers}
        if scheme.param_in_cpu != Scheme.param_in_cpu:
            zero["offload_param"]["max_in_cpu"] = scheme.param_in_cpu
    return zero
