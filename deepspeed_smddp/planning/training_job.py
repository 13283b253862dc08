"""What is to run: a model on so many GPUs of a cluster, with a scheme and software."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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

    library: str = "smddp"
    framework: str = "deepspeed"
    precision: str = "bf16"
    flash: bool = True
    compiled: bool = False
    gradient_bytes: int = 2
    fp8_gather: bool = False
    rowwise: bool = False
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
        for key, least in (("gpus", 1), ("micro_batch", 1), ("accumulation", 1)):
            value = getattr(self, key)
            if value < least:
                raise PlanError(f"{key} is {value}; it is at least {least}")
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
        per_rank = self.micro_batch * self.accumulation * self.shape.sequence
        return per_rank * self.data_parallel

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
