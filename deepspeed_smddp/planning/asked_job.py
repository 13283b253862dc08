"""The job that a user asks about: a model, a cluster, a batch, and perhaps a DeepSpeed config.

Also the network of a host as ``smddp bench`` has measured it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from deepspeed_smddp.config.ds_json import at
from deepspeed_smddp.config.parsing import parse_section
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.planning import PlanError
from deepspeed_smddp.planning.constants import values
from deepspeed_smddp.planning.hardware import Cluster
from deepspeed_smddp.planning.model_shape import ModelShape
from deepspeed_smddp.planning.training_job import Buckets, Job, Scheme, Software

# Of a step where neither the command nor the config has a batch: the Llama 2 paper's.
BATCH_TOKENS = 4 * 2**20


def of_config(
    shape: ModelShape,
    cluster: Cluster,
    gpus: int,
    config: Mapping[str, Any],
    *,
    recomputation: str = "full",
    batch_tokens: int = 0,
) -> Job:
    """The job that DeepSpeed would run with this config.

    Args:
        recomputation: "none", "selective" or "full": the model decides that, not the config.
        batch_tokens: of a step; 0: the config's batch, else ``BATCH_TOKENS``.

    Raises:
        PlanError: the config contradicts itself or the number of GPUs.
    """
    zero = "zero_optimization."
    try:
        section = parse_section(config.get("smddp", {}))
    except SmddpConfigError as error:
        raise PlanError(str(error)) from None
    scheme = Scheme(
        stage=_whole(config, zero + "stage", 0),
        degree=section.sharded_data_parallel_degree,
        tensor=_whole(config, "tensor_parallel.autotp_size", 1),
        pipeline=_whole(config, "pipe_parallel_size", 1),
        offload=at(config, zero + "offload_optimizer.device") in ("cpu", "nvme"),
    )
    buckets = Buckets(
        prefetch=_whole(config, zero + "stage3_prefetch_bucket_size", Buckets.prefetch),
        reduce=_whole(config, zero + "reduce_bucket_size", Buckets.reduce),
        persistence=_whole(
            config, zero + "stage3_param_persistence_threshold", Buckets.persistence
        ),
        max_live=_whole(config, zero + "stage3_max_live_parameters", Buckets.max_live),
        max_reuse=_whole(config, zero + "stage3_max_reuse_distance", Buckets.max_reuse),
    )
    library = "smddp" if config.get("comm_backend") == "smddp" else "nccl"
    job = Job(
        shape,
        cluster,
        gpus,
        scheme,
        Software(library=library, precision="fp16" if at(config, "fp16.enabled") else "bf16"),
        buckets,
        recomputation=recomputation,
    )
    return _with_batch(job, config, batch_tokens)


def _with_batch(job: Job, config: Mapping[str, Any], batch_tokens: int) -> Job:
    micro = _whole(config, "train_micro_batch_size_per_gpu", 0)
    steps = _whole(config, "gradient_accumulation_steps", 0)
    whole = _whole(config, "train_batch_size", 0)
    if batch_tokens:
        whole, steps = _samples(job, batch_tokens, micro or 1), 0
    if not whole and not (micro and steps):
        whole = _samples(job, BATCH_TOKENS, 1) if not micro else micro * job.data_parallel
    if not micro:
        micro = max(1, whole // job.data_parallel // max(1, steps))
    if not steps:
        steps = max(1, whole // (micro * job.data_parallel))
    if whole and whole != micro * steps * job.data_parallel:
        raise PlanError(
            f"a batch of {whole} sequences is not {micro} per micro-batch x {steps} micro-batches "
            f"x {job.data_parallel} data-parallel ranks"
        )
    return job.having(micro_batch=micro, accumulation=steps)


def _samples(job: Job, batch_tokens: int, micro: int) -> int:
    """Sequences of a step: about ``batch_tokens``, in whole micro-batches, at least one each."""
    each = round(batch_tokens / job.shape.sequence / job.data_parallel / micro)
    return max(1, each) * job.data_parallel * micro


def _whole(config: Mapping[str, Any], path: str, default: int) -> int:
    """A number of the config; "auto", which transformers fills in, counts as absent."""
    found = at(config, path)
    if found is None or found == "auto":
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found != int(found):
        raise PlanError(f'"{path}" in the DeepSpeed config is {found!r}; it is a whole number')
    return int(found)


class _Row(BaseModel):
    op: str
    bytes: int
    backend: str
    p50_us: float


class _Run(BaseModel):
    """Keys that the planner reads; ``hosts`` has the ranks of each host."""

    hosts: dict[str, list[int]]
    wrong: list[str]
    results: list[_Row]
    device: Literal["CPU", "GPU"]


def gbit_of_host(path: Path) -> float:
    """Gbit/s of a host's NICs, one direction, of which smddp's AllGather reaches its usual share.

    The rate of the fastest size, (H - 1) / H of the output by the time, is the share
    ``smddp.network`` of it: so the planner's AllGather of large buffers takes as long as the
    measured one, and what the simulated schedule adds to its lower bound.

    Raises:
        PlanError: the file is none of ``smddp bench``, or says nothing of a network.
    """
    try:
        run = _Run.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "smddp bench --json has not written it"
        )
        raise PlanError(f"{path} can't be read: {why}") from None
    if run.wrong:
        raise PlanError(f"{path} has wrong results: {run.wrong[0]}")
    if len(run.hosts) < 2:
        raise PlanError(
            f"{path} was measured inside one host, so that it says nothing of the network: run "
            "smddp bench on ranks of several hosts"
        )
    counts = [len(ranks) for ranks in run.hosts.values()]
    foreign = 1 - min(counts) / sum(counts)
    rates = [
        foreign * row.bytes / (row.p50_us * 1e-6)
        for row in run.results
        if (row.op, row.backend) == ("all_gather", "smddp") and row.p50_us > 0
    ]
    if not rates:
        raise PlanError(f"{path} has no AllGather over smddp: measure with --ops all_gather")
    return float(f"{max(rates) * 8e-9 / values()['smddp.network']:.3g}")
