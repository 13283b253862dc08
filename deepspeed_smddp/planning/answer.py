"""The answer of ``smddp plan``: everything about one job, for the page, the chart and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_smddp.planning import PlanError, recommendation
from deepspeed_smddp.planning.collective_time import RankGroup
from deepspeed_smddp.planning.memory_use import MemoryUse, fits, memory_use
from deepspeed_smddp.planning.step_time import StepTime, coding, communication_origin, step_time
from deepspeed_smddp.planning.training_job import Job


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
class Training:
    """A training of ``tokens`` tokens; the price is None if that of a host is not known."""

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    price: float | None


@dataclass(frozen=True)
class Planned:
    """One job with what it needs and takes."""

    job: Job
    memory: MemoryUse
    step: StepTime

    @staticmethod
    def of(job: Job) -> Planned:
        """Predicts ``job``."""
        return Planned(job, memory_use(job), step_time(job))

    @property
    def fits(self) -> bool:
        """Whether a GPU has the memory."""
        return fits(self.job, self.memory)

    @property
    def model_tflops(self) -> float:
        """TFLOPS per GPU, without what is computed again.

        Of forward and backward pass, 6 N + 12 L h s per token; Chowdhery et al., PaLM, app. B.
        """
        job, shape = self.job, self.job.shape
        per_token = 6.0 * shape.parameters + 12.0 * shape.layers * shape.q_width * shape.sequence
        return per_token * job.tokens_per_step / self.step.total / job.gpus / 1e12

    @property
    def hardware_tflops(self) -> float:
        """Per GPU, with the forward pass that full recomputation repeats."""
        return self.model_tflops * (4 / 3 if self.job.recomputation == "full" else 1.0)

    @property
    def limit(self) -> str:
        """What takes most of the step, in words."""
        step = self.step
        parts = {
            "computing": step.computing + step.slowed,
            "gathers of parameters": step.exposed_gathers,
            "reductions of gradients": step.exposed_reductions,
            "tensor parallelism": step.tensor,
            "the pipeline's bubble": step.bubble,
            "the optimizer": step.optimizer,
        }
        return max(parts, key=lambda name: parts[name])

    def training(self, tokens: float) -> Training | None:
        """A training of so many tokens, without restarts and evaluation; None without a number."""
        if not tokens:
            return None
        job = self.job
        steps = max(1, round(tokens / job.tokens_per_step))
        whole = steps * self.step.total
        price = job.cluster.price * job.hosts * whole / 3600 if job.cluster.price else None
        return Training(tokens, steps, whole, whole / 3600 * job.gpus, price)

    def as_json(self, tokens: float) -> dict[str, Any]:
        """Numbers in bytes, seconds and TFLOPS."""
        scheme, job, training = self.job.scheme, self.job, self.training(tokens)
        return {
            "model": job.shape.name,
            "parameters": job.shape.parameters,
            "cluster": job.cluster.name,
            "gpus": job.gpus,
            "scheme": asdict(scheme),
            "library": job.software.library,
            "micro_batch": job.micro_batch,
            "accumulation": job.accumulation,
            "recomputation": job.recomputation,
            "tokens_per_step": job.tokens_per_step,
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "memory_of_gpu_bytes": job.cluster.gpu.memory_bytes,
            "fits": self.fits,
            "step_seconds": asdict(self.step) | {"total": self.step.total},
            "sent_per_host_bytes": host_bytes(job),
            "model_tflops_per_gpu": self.model_tflops,
            "hardware_tflops_per_gpu": self.hardware_tflops,
            "tokens_per_second": job.tokens_per_step / self.step.total,
            "communication": communication_origin(job),
            "coding": coding(job),
            "limit": self.limit,
            "training": asdict(training) if training else None,
            "ds_config": recommendation.ds_config(job),
        }


def curve(job: Job) -> list[Planned]:
    """The job on up to 4,096 GPUs in powers of two, with both libraries and its batch per GPU."""
    points = []
    parts = job.scheme.tensor * job.scheme.pipeline
    gpus = max(job.cluster.gpus_per_host, parts)
    while gpus <= recommendation.MOST_GPUS:
        for library in ("smddp", "nccl"):
            degree = job.scheme.degree if job.scheme.degree < gpus // parts else 0
            try:
                points.append(Planned.of(job.having(gpus=gpus, library=library, degree=degree)))
            except PlanError:
                continue
        gpus *= 2
    return points


@dataclass(frozen=True)
class Answer:
    """``asked``: the job of the user's config, None without one.

    ``best``: the fastest that fits, or where none fits on ``gpus`` GPUs the nearest that does; None
    if there is none up to 4,096.
    """

    gpus: int
    asked: Planned | None
    best: Planned | None
    changes: list[recommendation.Change]
    curve: list[Planned]
    tokens: float  # of a training; 0: none was asked for

    @property
    def shown(self) -> Planned | None:
        """The job that the page describes."""
        return self.asked or self.best

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits: the config's job, or any on these GPUs."""
        shown = self.shown
        return shown is not None and shown.fits and shown.job.gpus == self.gpus

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "asked": self.asked.as_json(self.tokens) if self.asked else None,
            "recommended": self.best.as_json(self.tokens) if self.best else None,
            "changes": [
                {"change": c.text, "step_seconds": c.seconds, "fits": c.fits} for c in self.changes
            ],
            "curve": [
                {
                    "gpus": p.job.gpus,
                    "library": p.job.software.library,
                    "step_seconds": p.step.total,
                    "model_tflops_per_gpu": p.model_tflops,
                    "communication": communication_origin(p.job),
                }
                for p in self.curve
            ],
        }


def answer(job: Job, tokens: float, *, asked: bool) -> Answer:
    """Plans ``job``. ``asked``: it is the user's own configuration, not only a model and GPUs."""
    own = Planned.of(job) if asked else None
    best = recommendation.recommended(job) or recommendation.nearest_that_fits(job)
    planned = Planned.of(best) if best else None
    shown = own or planned
    changes = recommendation.single_changes(shown.job) if shown else []
    return Answer(job.gpus, own, planned, changes, curve(shown.job) if shown else [], tokens)
