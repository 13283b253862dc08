"""The answer of ``smddp plan``: everything about one job, for the page, the chart and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_smddp.planning import outlook
from deepspeed_smddp.planning.memory_use import MemoryUse, fits, memory_use
from deepspeed_smddp.planning.ready_config import ds_config
from deepspeed_smddp.planning.recommendation import (
    Change,
    nearest_that_fits,
    recommended,
    single_changes,
)
from deepspeed_smddp.planning.step_time import StepTime, communication_origin, step_time
from deepspeed_smddp.planning.training_job import Job


@dataclass(frozen=True)
class Planned:
    """One job with what it needs and takes. ``training`` is None without a number of tokens."""

    job: Job
    memory: MemoryUse
    step: StepTime
    host_bytes: float
    training: outlook.Training | None

    @staticmethod
    def of(job: Job, tokens: float = 0) -> Planned:
        """Predicts ``job`` and a training of ``tokens`` tokens."""
        step = step_time(job)
        training = outlook.training(job, step.total, tokens) if tokens else None
        return Planned(job, memory_use(job), step, outlook.host_bytes(job), training)

    @property
    def fits(self) -> bool:
        """Whether a GPU has the memory."""
        return fits(self.job, self.memory)

    @property
    def model_tflops(self) -> float:
        """Per GPU."""
        return outlook.model_tflops(self.job, self.step.total)

    @property
    def hardware_tflops(self) -> float:
        """Per GPU, with what is computed again."""
        return outlook.hardware_tflops(self.job, self.step.total)

    def as_json(self) -> dict[str, Any]:
        """Numbers in bytes, seconds and TFLOPS."""
        scheme, job = self.job.scheme, self.job
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
            "sent_per_host_bytes": self.host_bytes,
            "model_tflops_per_gpu": self.model_tflops,
            "hardware_tflops_per_gpu": self.hardware_tflops,
            "tokens_per_second": job.tokens_per_step / self.step.total,
            "communication": communication_origin(job),
            "limit": outlook.limit(self.step),
            "training": asdict(self.training) if self.training else None,
            "ds_config": ds_config(job),
        }


@dataclass(frozen=True)
class Answer:
    """``asked``: the job of the user's config, None without one.

    ``best``: the fastest that fits, or where none fits on ``gpus`` GPUs the nearest that does; None
    if there is none up to 4,096.
    """

    gpus: int
    asked: Planned | None
    best: Planned | None
    changes: list[Change]
    curve: list[outlook.Point]

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
            "asked": self.asked.as_json() if self.asked else None,
            "recommended": self.best.as_json() if self.best else None,
            "changes": [
                {"change": c.text, "step_seconds": c.seconds, "fits": c.fits} for c in self.changes
            ],
            "curve": [
                {
                    "gpus": p.gpus,
                    "library": p.library,
                    "step_seconds": p.step.total,
                    "model_tflops_per_gpu": p.tflops,
                    "communication": p.communication,
                }
                for p in self.curve
            ],
        }


def answer(job: Job, tokens: float, *, asked: bool) -> Answer:
    """Plans ``job``. ``asked``: it is the user's own configuration, not only a model and GPUs."""
    own = Planned.of(job, tokens) if asked else None
    best = recommended(job)
    if best is None:
        best = nearest_that_fits(job)
    planned = Planned.of(best, tokens) if best else None
    shown = own or planned
    changes = single_changes(shown.job) if shown else []
    return Answer(job.gpus, own, planned, changes, outlook.curve(shown.job) if shown else [])
