"""What a step means: FLOPs by both counts, bytes of links, the time and cost of a training."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_smddp.planning.collective_time import RankGroup
from deepspeed_smddp.planning.model_shape import ModelShape
from deepspeed_smddp.planning.plan_error import PlanError
from deepspeed_smddp.planning.step_time import StepTime, communication_origin, step_time
from deepspeed_smddp.planning.training_job import Job

MOST_GPUS = 4096


def flops_per_token(shape: ModelShape) -> float:
    """Model FLOPs of forward and backward pass, 6 N + 12 L h s; Chowdhery et al., PaLM, app. B."""
    return 6.0 * shape.parameters + 12.0 * shape.layers * shape.q_width * shape.sequence


def model_tflops(job: Job, seconds: float) -> float:
    """TFLOPS per GPU, without what is computed again."""
    return flops_per_token(job.shape) * job.tokens_per_step / seconds / job.gpus / 1e12


def hardware_tflops(job: Job, seconds: float) -> float:
    """TFLOPS per GPU, with the forward pass that full recomputation repeats."""
    return model_tflops(job, seconds) * (4 / 3 if job.recomputation == "full" else 1.0)


def host_bytes(job: Job) -> float:
    """Bytes that each host sends to others in a step at least, 0 within one host.

    Each collective of a group over H hosts takes (H - 1) / H of its buffer in and out of a host.
    """
    scheme, own = job.scheme, job.shape.parameters / job.scheme.pipeline
    all_ranks = RankGroup(job.data_parallel, scheme.tensor, job.cluster, job.software.library)
    hosts, all_hosts = all_ranks._replace(ranks=job.shard_ranks).hosts, all_ranks.hosts
    grads, params = job.software.gradient_bytes * own, 2.0 * own
    if scheme.stage < 3:
        parts = grads + (params if scheme.stage else grads)
        return parts * (all_hosts - 1) / all_hosts
    gathers = params * (1 if scheme.keep_gathered else 2)
    inner = (gathers + grads) * job.accumulation * (hosts - 1) / hosts
    copies = all_hosts / hosts
    return inner + 2 * grads / hosts * (copies - 1) / copies


@dataclass(frozen=True)
class Point:
    """The same job on another number of GPUs, with the same batch per GPU."""

    gpus: int
    library: str
    step: StepTime
    tflops: float
    communication: str


def curve(job: Job) -> list[Point]:
    """To 4,096 GPUs in powers of two, with both libraries; the batch grows with the GPUs."""
    points = []
    parts = job.scheme.tensor * job.scheme.pipeline
    gpus = max(job.cluster.gpus_per_host, parts)
    while gpus <= MOST_GPUS:
        for library in ("smddp", "nccl"):
            degree = job.scheme.degree if job.scheme.degree < gpus // parts else 0
            try:
                there = job.having(gpus=gpus, library=library, degree=degree)
            except PlanError:
                continue
            step = step_time(there)
            tflops = model_tflops(there, step.total)
            points.append(Point(gpus, library, step, tflops, communication_origin(there)))
        gpus *= 2
    return points


@dataclass(frozen=True)
class Training:
    """A training of ``tokens`` tokens; the price is None if that of a host is not known."""

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    price: float | None


def training(job: Job, seconds: float, tokens: float) -> Training:
    """What a training takes if each step takes ``seconds``; without restarts and evaluation."""
    steps = max(1, round(tokens / job.tokens_per_step))
    whole = steps * seconds
    price = job.cluster.price * job.hosts * whole / 3600 if job.cluster.price else None
    return Training(tokens, steps, whole, whole / 3600 * job.gpus, price)


def limit(step: StepTime) -> str:
    """What takes most of the step, in words."""
    parts = {
        "computing": step.computing + step.slowed,
        "gathers of parameters": step.exposed_gathers,
        "reductions of gradients": step.exposed_reductions,
        "tensor parallelism": step.tensor,
        "the pipeline's bubble": step.bubble,
        "the optimizer": step.optimizer,
    }
    return max(parts, key=lambda name: parts[name])
