"""Predicted over published training speeds as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed_smddp.planning.constants import values
from deepspeed_smddp.planning.training_job import Job
from planning.fitting import error
from planning.published import Row


def draw(covered: Sequence[tuple[Row, Job]], path: Path) -> None:
    """Writes the picture; equal input gives an equal file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "smddp"
    points = [
        (row, speed, speed * (1 + error(row, job, values())))
        for row, job in covered
        for speed in [_speed(row, job)]
    ]
    figure, axes = pyplot.subplots(figsize=(7, 6.4), layout="constrained")
    ends = (min(min(p[1:]) for p in points) * 0.8, max(max(p[1:]) for p in points) * 1.25)
    axes.plot(ends, ends, color="#444", linewidth=1)
    axes.fill_between(
        ends,
        [0.8 * e for e in ends],
        [1.2 * e for e in ends],
        color="#ddd",
        linewidth=0,
        label="within 20 %",
    )
    kinds = (
        ("held out", "#1f6fb4", "o", 16, lambda r: not r.fitted and not r.closed_library),
        ("fitted", "#999999", "o", 12, lambda r: r.fitted and not r.closed_library),
        ("the closed library's articles", "#c8401c", "D", 26, lambda r: r.closed_library),
    )
    for name, colour, marker, size, chosen in kinds:
        of = [(x, y) for row, x, y in points if chosen(row)]
        axes.scatter(*zip(*of, strict=True), s=size, c=colour, marker=marker, label=name, zorder=3)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="published, model TFLOPS per GPU",
        ylabel="predicted, model TFLOPS per GPU",
    )
    axes.set_aspect("equal")
    ticks = [20, 50, 100, 200, 400]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%d"))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.grid(color="#eee", zorder=0)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _speed(row: Row, job: Job) -> float:
    """The published figure in one unit: model TFLOPS per GPU, 6 N + 6 L h s per token."""
    per_token = (
        6 * job.shape.parameters + 6 * job.shape.layers * job.shape.hidden * job.shape.sequence
    )
    tokens = job.tokens_per_step
    if row.metric == "tokens_per_s_per_gpu":
        return row.value * per_token / 1e12
    if row.metric == "samples_per_s":
        return row.value * job.shape.sequence / job.gpus * per_token / 1e12
    if row.metric == "step_time_s":
        return tokens / row.value / job.gpus * per_token / 1e12
    return row.value * (0.75 if row.metric.startswith("hardware") else 1.0)
