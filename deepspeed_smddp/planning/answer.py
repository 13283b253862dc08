"""The answer of ``smddp plan``: everything about one job, for the page, the chart and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_smddp.planning import PlanError, recommendation
from deepspeed_smddp.planning.collective_time import RankGroup
from deepspeed_smddp.planning.constants import INTERVAL
from deepspeed_smddp.planning.memory_use import MemoryUse, Part, Verdict, memory_use
from deepspeed_smddp.planning.step_time import StepTime, beyond, element_bytes, step_time
from deepspeed_smddp.planning.training_job import Job


def host_bytes(job: Job) -> float:
    """Bytes that each host sends to others in a step at least, 0 within one host.

    Each collective of a group over H hosts takes (H - 1) / H of its buffer in and out of a host.
    """
    scheme, ranks = job.scheme, job.data_parallel * job.scheme.ulysses
    all_ranks = RankGroup(ranks, scheme.tensor, job.cluster, job.software.library)
    hosts, all_hosts = all_ranks._replace(ranks=job.shard_ranks).hosts, all_ranks.hosts
    parameter, gradient = element_bytes(job)
    grads = gradient * job.trained_parameters * scheme.tensor
    params = parameter * job.rank_parameters * scheme.tensor
    if scheme.stage < 3:
        parts = grads + (params if scheme.stage else grads)
        return parts * (all_hosts - 1) / all_hosts
    again = not scheme.keep_gathered and scheme.hpz == 1  # hpz: inside a host at best
    gathers = params * (2 if again else 1)
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


def interval(value: float) -> tuple[float, float]:
    """Between what a predicted time or rate should lie: docs/dev/planner-validation.md."""
    return value / INTERVAL, value * INTERVAL


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
    def verdict(self) -> Verdict:
        """Whether a GPU has the memory: surely, perhaps, or surely not."""
        return self.memory.verdict(self.job.cluster.gpu.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether a GPU may have the memory."""
        return self.verdict != "does not fit"

    @property
    def model_tflops(self) -> float:
        """TFLOPS per GPU, without what is computed again.

        Of forward and backward pass, 6 N + 12 L h s per token, N the parameters that a token
        passes; Chowdhery et al., PaLM, app. B. With LoRA, 4 N: frozen ones have no gradient.
        """
        job, shape = self.job, self.job.shape
        attention = 12.0 * shape.layers * shape.q_width * shape.sequence
        per_token = (4.0 if job.lora_rank else 6.0) * shape.active_parameters + attention
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

    def _memory(self) -> dict[str, Part]:
        memory = self.memory
        return {**memory.parts, "total": Part(memory.low, memory.high, "all parts")}

    def as_json(self, tokens: float) -> dict[str, Any]:
        """Numbers in bytes, seconds and TFLOPS; of memory the lowest, the highest, and why."""
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
            "memory_bytes": {name: part._asdict() for name, part in self._memory().items()},
            "host_memory_bytes": {n: part._asdict() for n, part in self.memory.host.items()},
            "nvme_bytes_per_host": self.memory.nvme,
            "memory_of_gpu_bytes": job.cluster.gpu.memory_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "step_seconds": asdict(self.step) | {"total": self.step.total},
            "step_seconds_interval": interval(self.step.total),
            "beyond_published": beyond(job),
            "sent_per_host_bytes": host_bytes(job),
            "model_tflops_per_gpu": self.model_tflops,
            "hardware_tflops_per_gpu": self.hardware_tflops,
            "tokens_per_second": job.tokens_per_step / self.step.total,
            "limit": self.limit,
            "training": asdict(training) if training else None,
            "ds_config": recommendation.ds_config(job),
        }


def smddp_or_nccl(job: Job) -> str:
    """Which of the two carries this job faster, where both were measured on its machines."""
    measured = job.cluster.measured_gbit
    if len(measured) < 2:
        counted = ""
        if job.software.library == "smddp" and job.hosts > 1 and "smddp" not in measured:
            counted = "; the times are NCCL's"
        return f"not known{counted}; measure with `smddp bench`"
    rates = f"smddp {measured['smddp']:,.0f}, NCCL {measured['nccl']:,.0f}"
    return f"AllGather between hosts, measured: {rates} Gbit/s per host"


def curve(job: Job) -> list[Planned]:
    """The job on up to 4,096 GPUs in powers of two, with its batch per GPU."""
    points = []
    parts = job.scheme.tensor * job.scheme.pipeline
    gpus = max(job.cluster.gpus_per_host, parts)
    while gpus <= recommendation.MOST_GPUS:
        degree = job.scheme.degree if job.scheme.degree < gpus // parts else 0
        with suppress(PlanError):
            points.append(Planned.of(job.having(gpus=gpus, degree=degree)))
        gpus *= 2
    return points


@dataclass(frozen=True)
class Answer:
    """``question``: what was asked for; ``asked``: that, if it is a config of the user's.

    ``best``: the fastest that fits, or where none fits on these GPUs the nearest that does; None
    if there is none up to 4,096.
    """

    question: Job
    asked: Planned | None
    best: Planned | None
    changes: list[recommendation.Change]
    curve: list[Planned]
    tokens: float  # of a training; 0: none was asked for
    not_considered: list[str]  # keys of the user's config

    @property
    def shown(self) -> Planned | None:
        """The job that the page describes."""
        return self.asked or self.best

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits: the config's job, or any on these GPUs."""
        shown = self.shown
        return shown is not None and shown.fits and shown.job.gpus == self.question.gpus

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "asked": self.asked.as_json(self.tokens) if self.asked else None,
            "not_considered": self.not_considered,
            "recommended": self.best.as_json(self.tokens) if self.best else None,
            "smddp_or_nccl": smddp_or_nccl(self.shown.job) if self.shown else None,
            "changes": [
                {"change": c.text, "step_seconds": c.seconds, "fits": c.fits} for c in self.changes
            ],
            "curve": [
                {
                    "gpus": p.job.gpus,
                    "step_seconds_interval": interval(p.step.total),
                    "model_tflops_per_gpu_interval": interval(p.model_tflops),
                    "beyond_published": beyond(p.job),
                }
                for p in self.curve
            ],
        }


def answer(job: Job, tokens: float, *, asked: bool, not_considered: Sequence[str] = ()) -> Answer:
    """Plans ``job``. ``asked``: it is the user's own configuration, not only a model and GPUs."""
    own = Planned.of(job) if asked else None
    best = recommendation.recommended(job) or recommendation.nearest_that_fits(job)
    planned = Planned.of(best) if best else None
    shown = own or planned
    changes = recommendation.single_changes(shown.job) if shown else []
    points = curve(shown.job) if shown else []
    return Answer(job, own, planned, changes, points, tokens, list(not_considered))
