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
    ``chunks``: model chunks of a pipeline stage (interleaved 1F1B). ``partition_activations``: what
    full recomputation keeps is divided over the tensor-parallel ranks, with
    ``offload_activations`` in host memory. ``ulysses``: ranks that share a sequence ("SP",
    DeepSpeed-Ulysses); the state is sharded over them as well. ``expert``: ranks over which the
    experts of a layer are divided. ``hpz``: ranks of a second copy of the parameters (ZeRO++).

    ``offload``: ``offload_ratio`` of the optimizer's states are in host memory, or on NVMe;
    ``offload_param``: where the parameters are, "cpu", "nvme" or "".
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
    offload_activations: bool = False
    ulysses: int = 1
    expert: int = 1
    hpz: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    offload_ratio: float = 1.0
    nvme_optimizer: bool = False
    optimizer_buffers: int = 4
    offload_param: str = ""
    param_buffers: int = 500_000_000  # elements of all of them
    param_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


@dataclass(frozen=True)
class Software:
    """What runs it. ``library`` carries the sharded collectives: "nccl" or "smddp".

    ``framework`` is "deepspeed", "fsdp", "fsdp2" or "megatron"; ``precision`` "bf16", "fp16",
    "fp8" or "fp32". ``optimizer``: DeepSpeed's name.
    ``flash``: attention without a matrix of scores in memory. ``compiled``: fused
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
    optimizer: str = "adamw"
    fused_optimizer: bool = False
    overlap_comm: bool = False  # DeepSpeed's stages 1 and 2: two buckets
    contiguous_gradients: bool = True
    fp32_accumulation: bool = False
    momentum: bool = False
    master_bytes: int = 4
    state_bytes: int = 4
    no_sync: bool = False  # FSDP as transformers' Trainer runs it: see memory_use.py

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
    sub_group: int = 1_000_000_000


# Their keys in "zero_optimization".
BUCKET_KEYS = {
    "prefetch": "stage3_prefetch_bucket_size",
    "reduce": "reduce_bucket_size",
    "persistence": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
}


@dataclass(frozen=True)
class Job:
    """One training job. ``micro_batch`` and ``accumulation`` are per data-parallel rank.

    ``lora_rank``: of adapters of every matrix but the experts', 0 if all parameters are trained;
    ``base_bits``: of the frozen matrices, 16, 8 or 4 (QLoRA). ``counted_layer``: bytes per token
    that a layer of the real model keeps, 0 if it was not counted (``real_activations.py``).
    """

    shape: ModelShape
    cluster: Cluster
    gpus: int
    scheme: Scheme = field(default_factory=Scheme)
    software: Software = field(default_factory=Software)
    buckets: Buckets = field(default_factory=Buckets)
    micro_batch: int = 1
    accumulation: int = 1
    recomputation: str = "full"
    lora_rank: int = 0
    base_bits: int = 16
    counted_layer: float = 0.0

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
        parts = scheme.tensor * scheme.pipeline * scheme.ulysses
        if parts < 1 or self.gpus % parts:
            raise PlanError(
                f"{self.gpus} GPUs can't be divided into copies of {scheme.tensor} tensor-parallel "
                f"times {scheme.pipeline} pipeline times {scheme.ulysses} sequence-parallel ranks"
            )
        if scheme.expert > 1 and (self.shape.experts % scheme.expert or not self.shape.experts):
            raise PlanError(
                f"{scheme.expert} expert-parallel ranks do not divide the {self.shape.experts} "
                f"experts of {self.shape.name}"
            )
        if self.base_bits not in (4, 8, 16) or (self.base_bits < 16 and not self.lora_rank):
            raise PlanError(
                f"matrices of {self.base_bits} bits: they may have 16, or with LoRA 8 or 4"
            )
        if scheme.degree and self.data_parallel * scheme.ulysses % scheme.degree:
            raise PlanError(
                f"the sharding degree {scheme.degree} does not divide the "
                f"{self.data_parallel * scheme.ulysses} data-parallel ranks"
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
        return self.gpus // (self.scheme.tensor * self.scheme.pipeline * self.scheme.ulysses)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which one copy of the sharded state is divided."""
        return self.scheme.degree or self.data_parallel * self.scheme.ulysses

    @property
    def rank_layer_parameters(self) -> float:
        """Parameters of a layer that one tensor- and expert-parallel rank has."""
        shape, scheme = self.shape, self.scheme
        others = shape.experts * shape.expert_matrices * (1 - 1 / scheme.expert)
        return (shape.layer_parameters - others) / scheme.tensor

    @property
    def rank_parameters(self) -> float:
        """What one rank would have without ZeRO, the one with the most: it has an embedding."""
        return self.stage_layers * self.rank_layer_parameters + self._outside

    @property
    def all_experts_parameters(self) -> float:
        """The same with the experts of its expert-parallel peers: ZeRO's shard is a part of it."""
        return self.stage_layers * self.shape.layer_parameters / self.scheme.tensor + self._outside

    @property
    def _outside(self) -> float:
        shape, scheme = self.shape, self.scheme
        outside = shape.embedding_parameters
        if scheme.pipeline > 1 and not shape.tied:
            outside -= shape.vocabulary * shape.hidden
        return outside / scheme.tensor

    @property
    def trained_parameters(self) -> float:
        """Of a rank's parameters those that have gradients: all, or the adapters'."""
        if not self.lora_rank:
            return self.rank_parameters
        shape, scheme = self.shape, self.scheme
        ends = 2 * (shape.hidden + shape.q_width) + 2 * (shape.hidden + shape.kv_width)
        if not shape.experts:
            ends += (3 if shape.gated else 2) * (shape.hidden + shape.ffn)
        return self.stage_layers * self.lora_rank * ends / scheme.tensor

    @property
    def unquantized_parameters(self) -> float:
        """Embeddings, norms, biases and routers: they stay in 16 bits."""
        shape = self.shape
        layer = shape.layer_vectors + shape.hidden * shape.experts
        return (self.stage_layers * layer + shape.embedding_parameters) / self.scheme.tensor

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
    **model: float,
) -> Job:
    """The job that DeepSpeed would run with this config.

    The ``model`` decides the recomputation, ``lora_rank``, ``base_bits`` and ``counted_layer``.
    ``batch_tokens`` are of a step; 0: the config's batch, else ``BATCH_TOKENS``.

    Raises:
        PlanError: the config contradicts itself or the number of GPUs.
    """
    try:
        section = parse_section(config.get("smddp", {}))
    except SmddpConfigError as error:
        raise PlanError(str(error)) from None
    stage = _whole(config, _ZERO + "stage", 0)
    degree = section.sharded_data_parallel_degree or _whole(config, _ZERO + "mics_shard_size", 0)
    scheme = Scheme(
        stage=stage,
        degree=max(0, degree),
        tensor=max(1, _whole(config, "tensor_parallel.autotp_size", 1)),
        pipeline=_whole(config, "pipe_parallel_size", 1),
        ulysses=_whole(config, "sequence_parallel_size", 1),
        expert=_whole(config, "expert_parallel.autoep_size", 1),
        partition_activations=at(config, "activation_checkpointing.partition_activations") is True,
        offload_activations=at(config, "activation_checkpointing.cpu_checkpointing") is True,
        **(_offload(config) | (_zero_plus_plus(config) if stage == 3 else {})),
    )
    name = at(config, "optimizer.type")
    library = "smddp" if config.get("comm_backend") == "smddp" else "nccl"
    job = Job(
        shape,
        cluster,
        gpus,
        scheme,
        Software(
            library=library,
            precision=_precision(config),
            optimizer=str(name).lower() if name not in (None, "auto") else "adamw",
            fused_optimizer=name not in (None, "auto") and not _plain_adam(config),
            momentum=bool(at(config, "optimizer.params.momentum")),
            overlap_comm=stage < 3 and at(config, _ZERO + "overlap_comm") is True,
            contiguous_gradients=at(config, _ZERO + "contiguous_gradients") is not False,
            fp32_accumulation=at(config, "data_types.grad_accum_dtype") in ("fp32", "float32"),
            **_narrow_states(config),
        ),
        _buckets(config, shape),
        recomputation=recomputation,
        **model,  # type: ignore[arg-type]
    )
    return _with_batch(job, config, batch_tokens)


_ZERO = "zero_optimization."


def _plain_adam(config: Mapping[str, Any]) -> bool:
    """torch's Adam, not fused, in place of DeepSpeed's fused one."""
    params = at(config, "optimizer.params") or {}
    return params.get("torch_adam") is True and params.get("fused") is not True


def _precision(config: Mapping[str, Any]) -> str:
    """Of the weights; where the config leaves it to transformers' arguments, bf16."""
    stated = [at(config, section + ".enabled") for section in ("fp16", "bf16", "bfloat16")]
    if stated[0] is True:
        return "fp16"
    return "fp32" if False in stated and True not in stated and "auto" not in stated else "bf16"


def _narrow_states(config: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of a master weight, and of one state of the optimizer."""
    sections = ("bf16", "bfloat16")
    narrow = any(at(config, f"{s}.bf16_master_weights_and_grads") is True for s in sections)
    narrow = narrow or at(config, "fp16.fp16_master_weights_and_grads") is True
    states = any(at(config, f"{s}.bf16_optimizer_states") is True for s in sections)
    return {"master_bytes": 2 if narrow else 4, "state_bytes": 2 if states else 4}


def _zero_plus_plus(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hpz": max(1, _whole(config, _ZERO + "zero_hpz_partition_size", 1)),
        "quantized_weights": at(config, _ZERO + "zero_quantized_weights") is True,
        "quantized_gradients": at(config, _ZERO + "zero_quantized_gradients") is True,
    }


def _offload(config: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = at(config, _ZERO + "offload_optimizer.device") or (
        "cpu" if at(config, _ZERO + "cpu_offload") is True else "none"
    )
    param = at(config, _ZERO + "offload_param.device") or (
        "cpu" if at(config, _ZERO + "cpu_offload_param") is True else "none"
    )
    for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device not in ("none", "cpu", "nvme"):
            raise PlanError(f'"{_ZERO}{key}.device" is {device!r}; it may be cpu, nvme or none')
    if param != "none" and _whole(config, _ZERO + "stage", 0) != 3:
        raise PlanError('"zero_optimization.offload_param" goes with stage 3 only')
    ratio = at(config, _ZERO + "offload_optimizer.ratio")
    pins = [at(config, f"{_ZERO}{k}.pin_memory") for k in ("offload_optimizer", "offload_param")]
    buffers = _whole(config, _ZERO + "offload_param.buffer_count", 5)
    return {
        "offload": optimizer != "none",
        "nvme_optimizer": optimizer == "nvme",
        "offload_ratio": float(ratio) if isinstance(ratio, (int, float)) else 1.0,
        "optimizer_buffers": _whole(config, _ZERO + "offload_optimizer.buffer_count", 4),
        "offload_param": "" if param == "none" else param,
        "param_buffers": buffers * _whole(config, _ZERO + "offload_param.buffer_size", 10**8),
        "param_in_cpu": _whole(config, _ZERO + "offload_param.max_in_cpu", 10**9),
        "pin_memory": False not in pins,
    }


def _buckets(config: Mapping[str, Any], shape: ModelShape) -> Buckets:
    """The sizes; "auto" as transformers fills it in (integrations/deepspeed.py)."""
    hidden = shape.hidden
    auto = {
        "prefetch": int(0.9 * hidden * hidden),
        "reduce": hidden * hidden,
        "persistence": 10 * hidden,
    }
    sizes = {}
    for name, key in BUCKET_KEYS.items():
        default = getattr(Buckets, name)
        if at(config, _ZERO + key) == "auto":
            default = auto.get(name, default)
        sizes[name] = _whole(config, _ZERO + key, default)
    return Buckets(**sizes)


def _with_batch(job: Job, config: Mapping[str, Any], batch_tokens: int) -> Job:
    micro = _whole(config, "train_micro_batch_size_per_gpu", 0)
    steps = _whole(config, "gradient_accumulation_steps", 0)
    whole = _whole(config, "train_batch_size", 0)
    if batch_tokens:
        whole, steps = _samples(job, batch_tokens, micro or 1), 0
    if not whole and not micro and steps:  # about BATCH_TOKENS in so many micro-batches
        micro = max(1, _samples(job, BATCH_TOKENS, 1) // job.data_parallel // steps)
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
