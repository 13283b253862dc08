"""What is to run: a model on so many GPUs of a cluster, with a scheme and software.

A job is that of a DeepSpeed config; the network of a host also as ``smddp bench`` has measured it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deepspeed_smddp.config.ds_json import at
from deepspeed_smddp.config.parsing import parse_section
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.planning import PlanError
from deepspeed_smddp.planning.hardware import Cluster
from deepspeed_smddp.planning.model_shape import ModelShape

RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Scheme:
    """How state and work are divided over the ranks.

    ``stage``: 0 is DDP; 1 to 3 are ZeRO's stages, 3 is also FSDP's full shard. ``degree``: the
    ranks that share one copy of the state, 0 for all data-parallel ranks. ``keep_gathered``:
    parameters stay gathered between forward and backward pass (FSDP's SHARD_GRAD_OP).
    ``sequence_parallel``: what lies between the divided layers is divided as well.
    ``chunks``: model chunks of a pipeline stage (interleaved 1F1B). ``offload``: optimizer states
    and inputs of layers are in host memory. ``partition_activations``: what full recomputation
    keeps is divided over the tensor-parallel ranks.
    """

    stage: int = 3
    degree: int = 0
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    keep_gathered: bool = False
    sequence_parallel: bool = False
    async_tensor: bool = False
    offload: bool = False
    partition_activations: bool = False


@dataclass(frozen=True)
class Software:
    """What runs it. ``library`` carries the sharded collectives: "nccl" or "smddp".

    ``framework`` is "deepspeed", "fsdp", "fsdp2" or "megatron"; ``precision`` "bf16", "fp16" or
    "fp8". ``flash``: attention without a matrix of scores in memory. ``compiled``: fused
    elementwise operations (torch.compile, or Megatron's fused kernels). ``gradient_bytes``: of an
    element on the wire.
    """

    library: str = "nccl"
    framework: str = "deepspeed"
    precision: str = "bf16"
    flash: bool = True
    compiled: bool = False
    gradient_bytes: int = 2
    fp8_gather: bool = False
    overlapped: bool = True
    generation: int = 2  # of the attention kernels: 1 FlashAttention or Triton, 2, 3 or cuDNN

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter of a layer that is gathered."""
        return 1 if self.fp8_gather else 2


@dataclass(frozen=True)
class Buckets:
    """DeepSpeed's sizes, in elements; the defaults are DeepSpeed's."""

    prefetch: int = 50_000_000
    reduce: int = 500_000_000
    persistence: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000


# Their keys in "zero_optimization".
BUCKET_KEYS = {
    "prefetch": "stage3_prefetch_bucket_size",
    "reduce": "reduce_bucket_size",
    "persistence": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
}


@dataclass(frozen=True)
class Job:
    """One training job. ``micro_batch`` and ``accumulation`` are per data-parallel rank."""

    shape: ModelShape
    cluster: Cluster
    gpus: int
    scheme: Scheme = field(default_factory=Scheme)
    software: Software = field(default_factory=Software)
    buckets: Buckets = field(default_factory=Buckets)
    micro_batch: int = 1
    accumulation: int = 1
    recomputation: str = "full"

    def __post_init__(self) -> None:
        for key in ("gpus", "micro_batch", "accumulation"):
            if getattr(self, key) < 1:
                raise PlanError(f"{key} is {getattr(self, key)}; it is at least 1")
        if self.recomputation not in RECOMPUTATIONS:
            raise PlanError(
                f"recomputation is {self.recomputation!r}; it may be {', '.join(RECOMPUTATIONS)}"
            )
        scheme = self.scheme
        if scheme.stage not in (0, 1, 2, 3):
            raise PlanError(f"the ZeRO stage is {scheme.stage}; it may be 0, 1, 2 or 3")
        parts = scheme.tensor * scheme.pipeline
        if parts < 1 or self.gpus % parts:
            raise PlanError(
                f"{self.gpus} GPUs can't be divided into copies of {scheme.tensor} tensor-parallel "
                f"times {scheme.pipeline} pipeline ranks"
            )
        if scheme.degree and self.data_parallel % scheme.degree:
            raise PlanError(
                f"the sharding degree {scheme.degree} does not divide the {self.data_parallel} "
                "data-parallel ranks"
            )
        if self.gpus > self.cluster.gpus_per_host and self.gpus % self.cluster.gpus_per_host:
            raise PlanError(
                f"{self.gpus} GPUs do not fill hosts of {self.cluster.gpus_per_host}; take a "
                "multiple"
            )
        if self.gpus > self.cluster.gpus_per_host and not self.cluster.network_gbit:
            raise PlanError(
                f"{self.gpus} GPUs need several hosts: say with --network how many Gbit/s one has"
            )
        if self.shape.heads % scheme.tensor or self.shape.ffn % scheme.tensor:
            raise PlanError(
                f"{scheme.tensor} tensor-parallel ranks do not divide the {self.shape.heads} heads "
                f"and the {self.shape.ffn} columns of {self.shape.name}"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.gpus // (self.scheme.tensor * self.scheme.pipeline)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which one copy of the sharded state is divided."""
        return self.scheme.degree or self.data_parallel

    @property
    def hosts(self) -> int:
        """Hosts of the job; a part of one counts as one."""
        return max(1, self.gpus // self.cluster.gpus_per_host)

    @property
    def stage_layers(self) -> float:
        """Layers of one pipeline stage, the mean."""
        return self.shape.layers / self.scheme.pipeline

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step of all ranks."""
        return self.micro_batch * self.accumulation * self.shape.sequence * self.data_parallel

    def having(self, **changes: object) -> Job:
        """The same job with other values; names of ``Scheme`` and ``Software`` are taken as well.

        Raises:
            PlanError: the result can't run.
        """
        scheme = {k: v for k, v in changes.items() if k in Scheme.__dataclass_fields__}
        software = {k: v for k, v in changes.items() if k in Software.__dataclass_fields__}
        rest = {k: v for k, v in changes.items() if k not in scheme and k not in software}
        return replace(
            self,
            scheme=replace(self.scheme, **scheme),  # type: ignore[arg-type]
            software=replace(self.software, **software),  # type: ignore[arg-type]
            **rest,  # type: ignore[arg-type]
        )


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

    The model decides the recomputation. ``batch_tokens`` are of a step; 0: the config's batch, else
    ``BATCH_TOKENS``.

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
    sizes = {n: _whole(config, zero + key, getattr(Buckets, n)) for n, key in BUCKET_KEYS.items()}
    library = "smddp" if config.get("comm_backend") == "smddp" else "nccl"
    job = Job(
        shape,
        cluster,
        gpus,
        scheme,
        Software(
            library=library,
            precision="fp16" if at(config, "fp16.enabled") else "bf16",
        ),
        Buckets(**sizes),
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


def measured_gbit(path: Path) -> dict[str, float]:
    """Gbit/s of a host, one direction, by library: the fastest AllGather that was measured.

    An AllGather moves (H - 1) / H of its output into a host.

    Raises:
        PlanError: the file is none of ``smddp bench``, or says nothing of a network.
    """
    try:
        run = _Run.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = getattr(error, "strerror", None) or "smddp bench --json has not written it"
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
    found: dict[str, float] = {}
    for row in run.results:
        if row.op == "all_gather" and row.backend in ("smddp", "nccl") and row.p50_us > 0:
            rate = foreign * row.bytes / (row.p50_us * 1e-6) * 8e-9
            found[row.backend] = max(rate, found.get(row.backend, 0.0))
    if not found:
        raise PlanError(f"{path} has no AllGather by smddp or NCCL: measure with --ops all_gather")
    return found
