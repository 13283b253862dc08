"""The page that compares predicted with published training speeds."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from deepspeed_smddp.planning.constants import COMPARED_SHARDED, CONSTANTS, INTERVAL
from planning import fitting
from planning.fitting import Covered, Errors
from planning.published import Row

_PAGE = """\
# The planner against published training speeds

`smddp plan` predicts the time of a training step. This page compares it with {all} published
figures ([the file](../../benchmarks/planning/published_training_speeds.csv) has all sources),
publisher by publisher: one constant is fitted to the other publishers' rows, and this one's are
predicted. It is written in less than a minute by

    python benchmarks/planner.py

The baseline copies the share of the GPU's peak of the nearest row: of the other publishers, which
is what the planner had to go by as well, and of any row, that publisher's own included.

| Left out | Rows | Median error | Within 20 % | In the interval | Copy of others | Copy of any |
|---|---|---|---|---|---|---|
{publishers}

The errors are absolute. {verdict}

The interval that `smddp plan` prints is a factor of {interval:g} to both sides. It comes from these
errors, each publisher with the same weight and one more that may lie anywhere (hierarchical
conformal prediction), so that it holds at least {share:.0f} % of the rows of a publisher that is
like these, on average. With so few publishers that takes a width that holds more of the rows known.
The column above takes for each publisher the interval that the others give.

| Rows | Number | Median error | In {interval:g} |
|---|---|---|---|
{classes}

## How sure this is

- No row was measured by us. Amazon's rows of its closed library are not predicted: smddp was not
  measured between GPUs of several hosts, and so the planner has no time for it.
- The form of the model, the rule for an unstated micro-batch (the largest that divides the batch
  and fits) and the sources of the constants were chosen by people who knew the rows. Leaving a
  publisher out judges the fit, not these choices.
- The rows of IBM, Kempner and TinyLlama were predicted before they were added, with the fit to the
  first seven publishers: median error 17.6 %, 12 of 17 within 1.25, most of them predicted too
  slow. One thing was mended after that: FSDP overlaps its AllReduces over replicas (HSDP). Then
  chenyaofo's, a user's table of transformers and DeepSpeed, with the fit to these ten: median error
  43.7 %, none of 9 within 1.25, all predicted too fast, with the optimizer on the CPU two to three
  times. Last NVIDIA's 13 rows of NeMo, in fp8, three of them with LoRA: 7.1 %, 13 of 13 within
  1.35. Nothing was changed for these two but the fit and the interval. The other publishers are
  teams that publish what they have tuned; untuned code is slower.
- {most} publishes {most_rows} of the {covered} rows. {gpus:,} GPUs are the most with ZeRO-3
  or FSDP.
- Assumed where a source is silent: H100 hosts have 3,200 Gbit/s, Kempner's of four H200 1,600,
  TinyLlama's of A100 400; Amazon's runs recompute all activations; GPT-NeoX 65B has Llama 65B's
  layers with a feed-forward network of four times the hidden size, and divides the kept inputs over
  its 8 tensor-parallel ranks.
- No row has QLoRA, experts, ZeRO++, offloaded parameters, a consumer card, hosts of other than 4
  or 8 GPUs, or less than 400 Gbit/s per host.

## The constants

`reached` is fitted: {reached:.2f}, and {low:.2f} to {high:.2f} in 90 % of bootstraps over
publishers. Each other constant was fitted beside it at half, once and twice its value; the column
has what 90 % of the bootstraps chose: a range for {undetermined}, which the rows so do not
determine. None of them is fitted. What belongs to a GPU is in
[hardware.json](../../deepspeed_smddp/planning/hardware.json).

| Constant | Value | Meaning | Source | Bootstrap |
|---|---|---|---|---|
{constants}

## Rows that are not covered

{left}
"""


def page(covered: Covered, left: Sequence[tuple[Row, str]]) -> str:
    """The whole page in Markdown."""
    errors = Errors.at(covered)
    names = list(errors.of)
    found, inside = errors.left_out(), errors.inside()
    others = fitting.nearest(covered, others=True)
    near = fitting.nearest(covered, others=False)
    counts = {name: len(rows) for name, rows in found.items()}
    every = sum(counts.values())
    low, high = fitting.bootstrap(lambda some: fitting.GRID[errors.fit(some)], names)
    ranges = fitting.identified(covered)
    lines = [
        _publisher(name, counts[name], found[name], inside[name], others[name], near[name])
        for name in names
    ]
    whole = sum(inside[name] * counts[name] for name in names) / every
    parts = (_flat(found), whole, _flat(others), _flat(near))
    lines.append(_publisher("**all rows**", every, *parts))
    most = max(names, key=counts.__getitem__)
    undetermined = sum(a != b for a, b in ranges.values())
    return _PAGE.format(
        all=len(covered) + len(left),
        publishers="\n".join(lines),
        verdict=_verdict(found, others, near),
        interval=INTERVAL,
        share=fitting.COVERED * 100,
        classes=_classes(covered, found),
        most=most,
        most_rows=counts[most],
        covered=every,
        gpus=COMPARED_SHARDED,
        reached=fitting.GRID[errors.fit(names)],
        low=low,
        high=high,
        undetermined=f"{undetermined} of {len(ranges)}",
        constants=_constants(ranges),
        left=_left(left),
    )


def relative(errors: Iterable[float]) -> list[float]:
    """Absolute errors, of logarithms: 0.1 is 10 % of the published figure."""
    return [abs(math.expm1(e)) for e in errors]


def median(errors: Iterable[float]) -> float:
    """Of the absolute errors, of logarithms."""
    return statistics.median(relative(errors))


def within(errors: Iterable[float], bound: float = 0.2) -> float:
    """The share of rows whose absolute error is at most ``bound``."""
    return statistics.fmean(e <= bound for e in relative(errors))


def _flat(found: Mapping[str, list[float]]) -> list[float]:
    return [e for errors in found.values() for e in errors]


def _publisher(
    name: str,
    count: int,
    found: list[float],
    inside: float,
    others: list[float],
    near: list[float],
) -> str:
    cells = (median(found), within(found), inside, median(others), median(near))
    return f"| {name} | {count} | {' | '.join(map(_percent, cells))} |"


def _verdict(*tables: Mapping[str, list[float]]) -> str:
    """Where the planner is no better than the baselines, in words."""
    found, others, near = ({k: median(v) for k, v in table.items()} for table in tables)
    words = []
    for baseline, what in ((others, "another publisher's row"), (near, "the nearest row of all")):
        worse = [name for name, error in found.items() if error >= baseline[name]]
        if worse:
            words.append(
                f"For {', '.join(worse)} the planner is **no better than copying {what}**."
            )
        else:
            words.append(f"The planner is better than copying {what} for every publisher.")
    return " ".join(words)


def _classes(covered: Covered, found: Mapping[str, list[float]]) -> str:
    left = {name: iter(errors) for name, errors in found.items()}
    classes: dict[str, list[float]] = {}
    for row, job in covered:
        where = "between hosts" if job.hosts > 1 else "inside a host"
        what = "ZeRO-3 and FSDP" if job.scheme.stage == 3 else "other schemes"
        classes.setdefault(f"{what}, {where}", []).append(next(left[row.publisher]))
    bound = math.log(INTERVAL)
    return "\n".join(
        f"| {name} | {len(of)} | {_percent(median(of))} | "
        f"{_percent(statistics.fmean(abs(e) <= bound for e in of))} |"
        for name, of in sorted(classes.items())
    )


def _constants(ranges: Mapping[str, tuple[float, float]]) -> str:
    lines = []
    for name, of in CONSTANTS.items():
        low, high = ranges.get(name, (0, 0))
        chosen = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines.append(
            f"| `{name}` | {of.value:g} | {of.meaning} | {of.source} | "
            f"{chosen if name in ranges else 'above'} |"
        )
    return "\n".join(lines)


def _left(left: Sequence[tuple[Row, str]]) -> str:
    counts = collections.Counter(f"{why} ({row.publisher})" for row, why in left)
    return "\n".join(f"- {count}: {why}" for why, count in counts.items())


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
