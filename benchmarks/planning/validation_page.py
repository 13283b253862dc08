"""The page that compares predicted with published training speeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from deepspeed_smddp.planning.constants import Constant, constants, values
from deepspeed_smddp.planning.step_time import step_time
from deepspeed_smddp.planning.training_job import Job
from planning.fitting import error
from planning.published import ASSUMED_GBIT, Row, predicted_value

Covered = Sequence[tuple[Row, Job]]

_UNITS = {
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "samples_per_s": "samples/s",
    "step_time_s": "s",
    "hardware_tflops_per_gpu": "TFLOPS/GPU (hardware)",
    "model_tflops_per_gpu": "TFLOPS/GPU (model)",
}

_INTRODUCTION = """\
# The planner against published training speeds

`smddp plan` predicts the time of a training step. This page compares it with {all} published
figures ([the file](../../benchmarks/planning/published_training_speeds.csv) has all sources) and
is written by

    python benchmarks/planner.py

An error of +10 % means that the planner is 10 % faster than what was published, whatever the unit.
The constants are fitted on every third row of the file, beginning with the first: {fitted} of the
{covered} rows that the planner's schemes cover. The other {held} are held out.

| Rows | Number | Median of the absolute error | Within 20 % |
|---|---|---|---|
{summary}

![Predicted over published](planner-validation.svg)

## How sure this is

- No row was measured by us, and smddp has not run on several GPUs. The smddp rows are those of the
  closed library; the planner predicts them with simulations of our core's schedules (90 % of a
  host's NICs carry data, 20 us of latency, 1 us per message), none of which is fitted. That our
  library reaches the same on these machines is not shown.
- The constants were fitted when smddp's communication was a formula of latency, messages and bytes.
  Of the fitted rows, 3, 6 and 9 are smddp's.
- The form of the model, the bounds, the allowance for fragmentation and the rule for an unstated
  micro-batch (the largest that divides the batch and fits) were chosen with all rows in view. So
  the held-out rows judge the constants, not the form.
- Rows of one source resemble each other: of a source with many rows, some are always fitted. Rows 6
  and 9 are the runs of rows 5 and 8 in another unit.
- Of NCCL over EFA between hosts with A100 there are four rows: 0 is fitted and decides
  `efa.network` nearly alone; 2, 4 and 7 are held out.
- Fitted constants that stand at a bound, as the rows ask for more than is plausible: {bounds}.
  `launch.*` and `elementwise.gated` are estimates that no fitted row decides.
- Assumed where a source is silent: H100 hosts have {gbit} Gbit/s; the articles about the closed
  library recompute all activations; GPT-NeoX 65B has Llama 65B's layers with a feed-forward network
  of four times the hidden size, and divides the kept inputs over its 8 tensor-parallel ranks; MiCS
  without a stated degree has the smallest number of hosts that holds the state.

"""


def page(covered: Covered, left: Sequence[tuple[Row, str]]) -> str:
    """The whole page in Markdown."""
    errors = [(row, job, error(row, job, values())) for row, job in covered]
    held = [e for row, _, e in errors if not row.fitted]
    fitted = [e for row, _, e in errors if row.fitted]
    closed = [e for row, _, e in errors if row.closed_library]
    bounds = [f"`{name}`" for name, of in constants().items() if _at_bound(of)]
    summary = "\n".join(
        f"| {name} | {len(of)} | {_percent(median(of))} | {_percent(within(of))} |"
        for name, of in (
            ("held out", held),
            ("fitted", fitted),
            ("of the closed library's articles", closed),
        )
    )
    text = _INTRODUCTION.format(
        all=len(covered) + len(left),
        fitted=len(fitted),
        covered=len(covered),
        held=len(held),
        summary=summary,
        gbit=ASSUMED_GBIT,
        bounds=", ".join(bounds) or "none",
    )
    return text + _by_source(errors) + _rows(errors) + _left(left) + _constants()


def median(errors: Sequence[float]) -> float:
    """Of the absolute errors."""
    return statistics.median(abs(e) for e in errors)


def within(errors: Sequence[float], bound: float = 0.2) -> float:
    """The share of rows whose absolute error is at most ``bound``."""
    return sum(abs(e) <= bound for e in errors) / len(errors)


def _at_bound(of: Constant) -> bool:
    """Whether the rows asked for more than the bounds allow."""
    margin = 1e-3 * (of.high - of.low)
    return of.origin == "fitted" and not (of.low + margin < of.value < of.high - margin)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _by_source(errors: Sequence[tuple[Row, Job, float]]) -> str:
    sources: dict[str, list[float]] = {}
    for row, _, e in errors:
        sources.setdefault(row.source, []).append(e)
    lines = [
        f"| {source} | {len(of)} | {statistics.median(of) * 100:+.1f} % | {_percent(median(of))} | "
        f"{_percent(max(abs(e) for e in of))} |"
        for source, of in sources.items()
    ]
    head = (
        "| Source | Rows | Median error | Median absolute error | Largest |\n|---|---|---|---|---|"
    )
    return "## By source\n\n" + head + "\n" + "\n".join(lines) + "\n\n"


def _rows(errors: Sequence[tuple[Row, Job, float]]) -> str:
    lines = []
    for row, job, e in errors:
        predicted = predicted_value(row, job, step_time(job).total)
        lines.append(
            f"| {row.number}{' f' if row.fitted else ''} | {row.model} | {job.gpus} x "
            f"{job.cluster.gpu.name} | {row.scheme} | {job.shape.sequence} | {job.micro_batch} | "
            f"{row.value:g} | {predicted:.4g} | {_UNITS[row.metric]} | {e * 100:+.1f} % |"
        )
    head = (
        "| Row | Model | GPUs | Scheme | Sequence | Micro-batch | Published | Predicted | Unit | "
        "Error |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    return "## Every row\n\nf: fitted.\n\n" + head + "\n" + "\n".join(lines) + "\n\n"


def _left(left: Sequence[tuple[Row, str]]) -> str:
    lines = [f"| {row.number} | {row.model} | {row.scheme} | {why} |" for row, why in left]
    head = "| Row | Model | Scheme | Why |\n|---|---|---|---|"
    return "## Rows that are not covered\n\n" + head + "\n" + "\n".join(lines) + "\n\n"


def _constants() -> str:
    lines = [
        f"| `{name}` | {of.value:.4g} {of.unit if of.unit != '1' else ''} | "
        f"{f'{of.low:g} to {of.high:g}' if of.origin == 'fitted' else 'given'} | {of.meaning} |"
        for name, of in constants().items()
    ]
    head = "| Constant | Value | Bounds | Meaning |\n|---|---|---|---|"
    return "## The constants\n\n" + head + "\n" + "\n".join(lines) + "\n"
