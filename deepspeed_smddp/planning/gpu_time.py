"""How long one GPU computes: matrix products, attention, what memory bounds, optimizer.

FLOPs: Narayanan et al., "Efficient Large-Scale Language Model Training" (SC 2021), appendix; half
of the scores are skipped where attention is causal and fused. A matrix product reaches a share of
the peak that grows with its dimensions; elementwise work moves bytes; a layer takes at least the
time in which its kernels can be launched. What the shares are is in ``constants.json``.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_smddp.planning.constants import Values
from deepspeed_smddp.planning.training_job import Job

# Backward passes per forward pass: a product has two; FlashAttention computes the scores again.
BACKWARD_GEMM = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_ELEMENTWISE = 2.0
# Adam reads and writes parameter, two moments and master copy in 4 bytes, and the gradient.
ADAM_BYTES = 4 * 2 * 3 + 2 + 2 + 2


@dataclass(frozen=True)
class GpuTime:
    """Seconds of one micro-batch on one GPU, without communication."""

    layer_forward: float
    layer_backward: float  # with what is computed again
    outside_forward: float  # embedding, output layer and loss
    outside_backward: float
    optimizer: float  # of a step, not of a micro-batch


def gpu_time(job: Job, c: Values) -> GpuTime:
    """What one GPU of ``job`` computes."""
    gemm, attention, elementwise = _layer(job, c)
    forward = gemm + attention + elementwise
    backward = (
        BACKWARD_GEMM * gemm + BACKWARD_ATTENTION * attention + BACKWARD_ELEMENTWISE * elementwise
    )
    if job.recomputation == "full":
        backward += forward
    elif job.recomputation == "selective":
        backward += _selective(job, c, gemm, attention, elementwise)
    launch = c["launch.compiled"] if job.software.compiled else c["launch.eager"]
    outside = _outside(job, c)
    return GpuTime(
        layer_forward=max(forward, launch),
        layer_backward=max(backward, 2 * launch),
        outside_forward=outside,
        outside_backward=2 * outside,
        optimizer=_optimizer(job, c),
    )


def gemm_rate(job: Job, c: Values, columns: float) -> float:
    """FLOP/s of a product of all tokens by a matrix of hidden size x ``columns``."""
    gpu, precision = job.cluster.gpu, job.software.precision
    share = c[f"gemm.{gpu.generation}"]
    peak = gpu.half_flops
    if precision == "fp8" and gpu.fp8_flops:
        peak, share = gpu.fp8_flops, share * c["gemm.fp8"]
        if job.software.rowwise:
            share *= c["gemm.rowwise"]
    tokens = job.micro_batch * job.shape.sequence
    small = c["gemm.half_width"]
    shape = 1 + small / job.shape.hidden + small / columns + c["gemm.half_tokens"] / tokens
    return peak * share / shape


def _layer(job: Job, c: Values) -> tuple[float, float, float]:
    """Forward pass of one layer: matrix products, attention, what memory bounds."""
    shape, tensor, gpu = job.shape, job.scheme.tensor, job.cluster.gpu
    tokens = job.micro_batch * shape.sequence
    columns = min(shape.q_width, shape.ffn) / tensor
    gemm = 2 * tokens * shape.layer_matrices / tensor / gemm_rate(job, c, columns)
    scores = 4 * tokens * shape.sequence * shape.q_width / tensor
    memory = gpu.memory_rate * c["memory.share"]
    passes = c[f"elementwise.{_kernels(job)}"]
    whole = shape.hidden / (tensor if job.scheme.sequence_parallel else 1)
    wide = (shape.ffn * (2 if shape.gated else 1) + shape.q_width) / tensor
    elementwise = 2 * passes * tokens * (4 * whole + wide) / memory
    if job.software.flash:
        generation = f"attention.{gpu.generation}"
        share = c[generation] * (c["attention.first"] if job.software.generation == 1 else 1.0)
        narrow = 1 + c["attention.half_length"] / shape.sequence
        attention = 0.5 * scores / (gpu.half_flops * share) * narrow
    else:
        attention = scores / gemm_rate(job, c, shape.sequence)
        elements = tokens * shape.sequence * shape.heads / tensor
        elementwise += c["elementwise.scores"] * 2 * elements / memory
    return gemm, attention, elementwise


def _kernels(job: Job) -> str:
    """Which constant says how often elementwise kernels pass over a layer's activations."""
    if job.software.compiled:
        return "compiled" if job.software.framework == "fsdp2" else "fused"
    return "gated" if job.shape.gated else "eager"


def _selective(job: Job, c: Values, gemm: float, attention: float, elementwise: float) -> float:
    """Megatron computes attention again; torchtitan every second product and elementwise work."""
    if job.software.framework == "megatron":
        return attention
    return c["recompute.selective"] * gemm + elementwise


def _outside(job: Job, c: Values) -> float:
    """Output layer and loss, forward; the stages of a pipeline share it evenly, as an estimate."""
    shape, tensor, gpu = job.shape, job.scheme.tensor, job.cluster.gpu
    tokens = job.micro_batch * shape.sequence
    half = job.having(precision="bf16") if job.software.precision == "fp8" else job
    gemm = 2 * tokens * shape.hidden * shape.vocabulary / tensor
    logits = c["elementwise.loss"] * tokens * shape.vocabulary / tensor
    seconds = gemm / gemm_rate(half, c, shape.vocabulary / tensor)
    return (seconds + logits / (gpu.memory_rate * c["memory.share"])) / job.scheme.pipeline


def _optimizer(job: Job, c: Values) -> float:
    """Adam over this GPU's part; on the CPU with ``offload``."""
    scheme, gpu = job.scheme, job.cluster.gpu
    own = job.shape.parameters / (scheme.tensor * scheme.pipeline)
    if scheme.stage >= 1:
        own /= job.shard_ranks
    if scheme.offload:
        return own * c["optimizer.offload"]
    return own * ADAM_BYTES / (gpu.memory_rate * c["memory.share"]) + c["optimizer.fixed"]
