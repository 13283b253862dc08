"""How long one training step takes, and what of its communication is hidden behind computing.

The schedule is DeepSpeed's and FSDP's: while a layer computes, the next one is gathered, and in the
backward pass the gradients of the previous one are reduced as well. A layer so takes the longer of
both, and a share of the shorter that the two can't overlap. The collectives' kernels also slow the
layers that they overlap with. Tensor-parallel AllReduces stand between computing: none is hidden.

FLOPs: Narayanan et al., "Efficient Large-Scale Language Model Training" (SC 2021), appendix; half
of the scores are skipped where attention is causal and fused. A matrix product computes and reads
its weights; elementwise work moves bytes; a layer takes at least the time in which its kernels can
be launched. The shares are in ``constants.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepspeed_smddp.planning import constants
from deepspeed_smddp.planning.collective_time import RankGroup, collective_seconds
from deepspeed_smddp.planning.constants import Values, values
from deepspeed_smddp.planning.training_job import Job

# Backward passes per forward pass: a product has two; FlashAttention computes the scores again.
BACKWARD_GEMM = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_ELEMENTWISE = 2.0
# Adam reads and writes parameter, two moments and master copy in 4 bytes, and the gradient.
ADAM_BYTES = 4 * 2 * 3 + 2 + 2 + 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one GPU. The parts of ``total`` are disjoint.

    ``slowed``: what computing loses while collectives' kernels run. ``hidden`` is communication
    behind computing; it is not a part of ``total``.
    """

    computing: float
    optimizer: float
    slowed: float
    exposed_gathers: float
    exposed_reductions: float
    tensor: float
    bubble: float
    hidden: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum((float(getattr(self, f.name)) for f in fields(self) if f.name != "hidden"), 0.0)


@dataclass(frozen=True)
class _Overlap:
    """Communication ``wire`` beside computing ``busy``, both in seconds."""

    exposed: float
    hidden: float
    slowed: float

    @staticmethod
    def of(wire: float, busy: float, job: Job, c: Values) -> _Overlap:
        if not job.software.overlapped:
            return _Overlap(wire, 0.0, 0.0)
        hidden = min(wire, busy) * c["overlap.share"]
        return _Overlap(wire - hidden, hidden, c["nccl.contention"] * hidden)


def step_time(job: Job, c: Values | None = None) -> StepTime:
    """The time of one optimizer step of ``job``; ``c``: None for the published constants."""
    c = values() if c is None else c
    gpu = gpu_time(job, c)
    layers, micro = job.stage_layers, job.accumulation
    computing = micro * (layers * (gpu.layer_forward + gpu.layer_backward) + 3 * gpu.outside)
    tensor = micro * layers * (_tensor_per_layer(job, c) + _exchanged_per_layer(job, c))
    schedule = _sharded if job.scheme.stage == 3 else _replicated
    gathers, reductions = schedule(job, gpu, c)
    both = [*gathers, *reductions]
    bubble = 0.0
    if job.scheme.pipeline > 1:
        # Narayanan et al., section 2.2: (p - 1) / (v m) of the step's own work.
        share = (job.scheme.pipeline - 1) / (job.scheme.chunks * micro)
        bubble = share * (computing + tensor)
    return StepTime(
        computing,
        gpu.optimizer,
        sum(o.slowed for o in both),
        sum(o.exposed for o in gathers),
        sum(o.exposed for o in reductions),
        tensor,
        bubble,
        sum(o.hidden for o in both),
    )


def beyond(job: Job) -> list[str]:
    """In which respects no published speed that the interval was checked with is like ``job``."""
    gpu, network = job.cluster.gpu.name, job.cluster.network_gbit
    named = {
        f"GPUs {gpu}": gpu not in constants.COMPARED_GPUS,
        f"{network:g} Gbit/s per host": job.hosts > 1 and network < constants.COMPARED_GBIT,
        f"{job.cluster.gpus_per_host} GPUs per host": job.gpus > 1
        and job.cluster.gpus_per_host not in constants.COMPARED_PER_HOST,
        "frozen matrices of 8 or 4 bits": job.base_bits < 16,
        "experts": bool(job.shape.experts),
        "sequence parallelism": job.scheme.ulysses > 1,
        "offloaded parameters": bool(job.scheme.offload_param),
        "an optimizer on NVMe": job.scheme.nvme_optimizer,
        "ZeRO++": job.scheme.hpz > 1
        or job.scheme.quantized_weights
        or job.scheme.quantized_gradients,
        f"{job.gpus:,} GPUs": job.gpus > constants.COMPARED_SHARDED and job.scheme.stage == 3,
    }
    return [words for words, is_so in named.items() if is_so]


def _tensor_per_layer(job: Job, c: Values) -> float:
    """AllReduces of tensor parallelism: two forward, two backward, two more if computed again."""
    scheme, shape = job.scheme, job.shape
    if scheme.tensor == 1:
        return 0.0
    nbytes = 2.0 * job.micro_batch * shape.sequence * shape.hidden
    once = collective_seconds(
        "all_reduce", nbytes, RankGroup(scheme.tensor, 1, job.cluster, "nccl"), c
    )
    times = 4 + (2 if job.recomputation == "full" else 0)
    left = c["tensor.async_exposed"] if scheme.async_tensor else 1.0
    return times * once * left


def _exchanged_per_layer(job: Job, c: Values) -> float:
    """All-to-alls: of Ulysses' four projections, and of tokens to experts and back; none hidden.

    Each moves (n - 1) / n of a rank's tokens, as an AllGather of them would.
    """
    scheme, shape = job.scheme, job.shape
    passes = 3 if job.recomputation == "full" else 2
    tokens = job.micro_batch * shape.sequence / scheme.ulysses
    seconds = 0.0
    widths = 2.0 * (2 * shape.q_width + 2 * shape.kv_width) / scheme.tensor
    for ranks, width in (
        (scheme.ulysses, widths),
        (scheme.expert, 4.0 * shape.top_k * shape.hidden),
    ):
        group = RankGroup(ranks, scheme.tensor, job.cluster, "nccl")
        seconds += passes * collective_seconds("all_gather", tokens * width, group, c)
    return seconds


def _sharded(job: Job, gpu: GpuTime, c: Values) -> tuple[list[_Overlap], list[_Overlap]]:
    """ZeRO-3: a gather before every layer in both passes, a reduction after its backward pass."""
    scheme, shape = job.scheme, job.shape
    group = _group(job, job.shard_ranks)
    parameter, gradient = element_bytes(job)
    layer = job.rank_layer_parameters
    outside = shape.embedding_parameters / scheme.tensor / scheme.pipeline
    trained = job.trained_parameters / job.rank_parameters
    layers, micro = job.stage_layers, job.accumulation
    copied = _copied(job, parameter * layer, c)
    gather = collective_seconds("all_gather", parameter * layer, group, c) + copied
    reduce = collective_seconds("reduce_scatter", gradient * trained * layer, group, c)
    forward = _Overlap.of(gather, gpu.layer_forward, job, c)
    early, late = _replica_all_reduce(job, group, c)
    again = 0.0 if scheme.keep_gathered else gather
    if scheme.hpz > 1:  # a second copy, divided over fewer ranks
        near = group._replace(ranks=scheme.hpz)
        again = collective_seconds("all_gather", parameter * layer, near, c)
    first = collective_seconds("all_gather", parameter * outside, group, c)
    last = 0.0
    if not job.lora_rank:
        last = collective_seconds("reduce_scatter", gradient * outside, group, c)
    gathers = [_scaled(forward, micro * layers), _Overlap(micro * first, 0.0, 0.0)]
    reductions = [_Overlap(micro * last, 0.0, 0.0), _Overlap(late, 0.0, 0.0)]
    # The last micro-step's backward pass also carries the replica all-reduce.
    for times, averaged in ((micro - 1, 0.0), (1, early / layers)):
        # One network carries both directions' worth: what a layer needs follows one another.
        wire = again + reduce + averaged
        backward = _Overlap.of(wire, gpu.layer_backward, job, c)
        part = again / wire if wire else 0.0
        gathers.append(_scaled(backward, times * layers * part))
        reductions.append(_scaled(backward, times * layers * (1 - part)))
    return gathers, reductions


def element_bytes(job: Job) -> tuple[float, float]:
    """Of a parameter that ZeRO-3 gathers, and of a gradient that it reduces.

    ZeRO++ gathers 8 bits and reduces 4; a frozen layer has its own width.
    """
    scheme, software = job.scheme, job.software
    parameter = 1.0 if scheme.quantized_weights else float(software.parameter_bytes)
    gradient = 0.5 if scheme.quantized_gradients else float(software.gradient_bytes)
    return parameter * job.base_bits / 16, gradient


def _copied(job: Job, nbytes: float, c: Values) -> float:
    """Seconds in which a rank's part of a layer comes from the host's memory, or from NVMe."""
    if not job.scheme.offload_param:
        return 0.0
    rate = c["host.copy" if job.scheme.offload_param == "cpu" else "host.nvme"]
    return nbytes / job.shard_ranks / rate


def _replica_all_reduce(job: Job, group: RankGroup, c: Values) -> tuple[float, float]:
    """The AllReduces over the replicas: what may overlap the last backward pass, and the rest.

    FSDP averages a layer after its reduction, smddp in DeepSpeed a bucket, DeepSpeed's MiCS all at
    the step. The last is ready when the pass is over. With an offloaded optimizer all waits.
    """
    copies = job.data_parallel * job.scheme.ulysses // group.ranks
    if copies == 1:
        return 0.0, 0.0
    own = job.trained_parameters
    nbytes = job.software.gradient_bytes * own / group.ranks
    across = group._replace(ranks=copies, spacing=group.ranks * group.spacing)
    software = job.software
    fsdp = software.framework in ("fsdp", "fsdp2")
    early = fsdp or (software.library == "smddp" and software.framework == "deepspeed")
    if not early or not software.overlapped or job.scheme.offload:
        return 0.0, collective_seconds("all_reduce", nbytes, across, c)
    buckets = float(job.shape.layers) if fsdp else max(1.0, own / job.buckets.reduce)
    whole = collective_seconds("all_reduce", nbytes, across, c, buckets)
    return whole * (1 - 1 / buckets), whole / buckets


def _replicated(job: Job, gpu: GpuTime, c: Values) -> tuple[list[_Overlap], list[_Overlap]]:
    """DDP and ZeRO-1, 2: gradients are reduced in the last backward pass, parameters gathered."""
    scheme, group = job.scheme, _group(job, job.data_parallel * job.scheme.ulysses)
    if group.ranks == 1:
        return [], []
    own = job.trained_parameters
    grads = job.software.gradient_bytes * own
    busy = job.stage_layers * gpu.layer_backward
    calls = max(1.0, own / job.buckets.reduce)
    whole = scheme.stage == 0 or job.shard_ranks < group.ranks
    wire = collective_seconds("all_reduce" if whole else "reduce_scatter", grads, group, c, calls)
    gathers = []
    if scheme.stage:
        after = collective_seconds("all_gather", 2 * own, _group(job, job.shard_ranks), c, calls)
        gathers.append(_Overlap(after, 0.0, 0.0))
    return gathers, [_Overlap.of(wire, busy, job, c)]


def _group(job: Job, ranks: int) -> RankGroup:
    """So many data-parallel ranks of the job."""
    return RankGroup(ranks, job.scheme.tensor, job.cluster, job.software.library)


def _scaled(of: _Overlap, times: float) -> _Overlap:
    return _Overlap(of.exposed * times, of.hidden * times, of.slowed * times)


@dataclass(frozen=True)
class GpuTime:
    """Seconds of one micro-batch on one GPU, without communication."""

    layer_forward: float
    layer_backward: float  # with what is computed again
    outside: float  # embedding, output layer and loss; twice as long in the backward pass
    optimizer: float  # of a step, not of a micro-batch


def gpu_time(job: Job, c: Values) -> GpuTime:
    """What one GPU of ``job`` computes."""
    gemm, attention, elementwise = _layer(job, c)
    forward = gemm + attention + elementwise
    # Frozen matrices have no gradient: one product in place of two.
    products = 1.0 if job.lora_rank else BACKWARD_GEMM
    backward = products * gemm + BACKWARD_ATTENTION * attention + BACKWARD_ELEMENTWISE * elementwise
    if job.recomputation == "full":
        backward += forward
    elif job.recomputation == "selective":  # torchtitan: every second product
        megatron = job.software.framework == "megatron"
        backward += attention if megatron else c["recompute.selective"] * gemm + elementwise
    return GpuTime(
        layer_forward=max(forward, c["launch"]),
        layer_backward=max(backward, 2 * c["launch"]),
        outside=_outside(job, c),
        optimizer=_optimizer(job, c),
    )


def gemm_rate(job: Job, c: Values) -> float:
    """FLOP/s of a product of all tokens by a matrix, whose elements are read at the memory's rate.

    Computing takes 2 FLOP per token and element, reading it 2 bytes: a roofline whose parts add up.
    """
    gpu, precision = job.cluster.gpu, job.software.precision
    peak, share = gpu.flops(precision), c["reached"] * gpu.matmul
    if peak != gpu.flops("bf16"):
        share *= c["gemm.fp8"]
    tokens = job.micro_batch * job.shape.sequence / job.scheme.ulysses
    tokens *= (job.shape.top_k or 1) / (job.shape.experts or 1)  # that share a matrix, on average
    return peak * share / (1 + gpu.flops("bf16") / gpu.memory_rate / tokens)


def _layer(job: Job, c: Values) -> tuple[float, float, float]:
    """Forward pass of one layer: matrix products, attention, what memory bounds."""
    shape, tensor, gpu = job.shape, job.scheme.tensor, job.cluster.gpu
    tokens = job.micro_batch * shape.sequence / job.scheme.ulysses
    gemm = 2 * tokens * shape.layer_matrices / tensor / gemm_rate(job, c)
    scores = 4 * tokens * shape.sequence * shape.q_width / tensor
    memory = gpu.memory_rate * c["memory.share"]
    kernels = "gated" if shape.gated and not job.software.compiled else "fused"
    passes = c[f"elementwise.{kernels}"]  # over a layer's activations
    whole = shape.hidden / (tensor if job.scheme.sequence_parallel else 1)
    wide = (shape.active_ffn * (2 if shape.gated else 1) + shape.q_width) / tensor
    elementwise = 2 * passes * tokens * (4 * whole + wide) / memory
    if job.base_bits < 16:  # the frozen matrices are written in 16 bits for each product
        elementwise += (2 + job.base_bits / 8) * shape.layer_matrices / tensor / memory
    if job.software.flash:
        share = gpu.attention * (c["attention.first"] if job.software.generation == 1 else 1.0)
        attention = 0.5 * scores / (gpu.flops("bf16") * c["reached"] * share)
    else:
        attention = scores / gemm_rate(job, c)
        elements = tokens * shape.sequence * shape.heads / tensor
        elementwise += c["elementwise.scores"] * 2 * elements / memory
    return gemm, attention, elementwise


def _outside(job: Job, c: Values) -> float:
    """Output layer and loss, forward; the stages of a pipeline share it evenly, as an estimate."""
    shape, tensor, gpu = job.shape, job.scheme.tensor, job.cluster.gpu
    tokens = job.micro_batch * shape.sequence / job.scheme.ulysses
    half = job.having(precision="bf16") if job.software.precision == "fp8" else job
    gemm = 2 * tokens * shape.hidden * shape.vocabulary / tensor
    logits = c["elementwise.loss"] * tokens * shape.vocabulary / tensor
    seconds = gemm / gemm_rate(half, c)
    return (seconds + logits / (gpu.memory_rate * c["memory.share"])) / job.scheme.pipeline


def _optimizer(job: Job, c: Values) -> float:
    """Adam over this GPU's part; on the CPU with ``offload``."""
    scheme, gpu = job.scheme, job.cluster.gpu
    own = job.trained_parameters
    if scheme.stage >= 1:
        own /= job.shard_ranks
    away = scheme.offload_ratio if scheme.offload else 0.0
    slow = c["optimizer.offload"]
    if scheme.nvme_optimizer:  # 12 bytes of states in, and out
        slow += 24 / c["host.nvme"]
    near = (1 - away) * own * ADAM_BYTES / (gpu.memory_rate * c["memory.share"])
    return away * own * slow + near + c["optimizer.fixed"]
