"""The curve to 4,096 GPUs as a picture."""

from __future__ import annotations

from pathlib import Path

from deepspeed_smddp.diagnostics import pictures
from deepspeed_smddp.planning.plan_error import PlanError
from deepspeed_smddp.planning.planned import Answer


def draw(answer: Answer, path: Path) -> None:
    """Writes the picture.

    Raises:
        PlanError: matplotlib is missing, or the file can't be written.
    """
    pictures.check_available(PlanError, "the chart")
    from matplotlib.figure import Figure

    shown = answer.shown
    assert shown is not None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for library, name, colour in (("smddp", "smddp", "#c8401c"), ("nccl", "NCCL", "#1f6fb4")):
        points = [p for p in answer.curve if p.library == library]
        axes.plot(
            [p.gpus for p in points],
            [p.tflops for p in points],
            marker="o",
            color=colour,
            label=name,
        )
    gpus = sorted({p.gpus for p in answer.curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs, the same batch per GPU")
    axes.set_ylabel("model TFLOPS per GPU, predicted")
    axes.set_title(f"{shown.job.shape.name} on {shown.job.cluster.name}", fontsize=10)
    axes.grid(color="#eee")
    axes.legend(frameon=False)
    pictures.save(figure, path, PlanError, dpi=120)
