"""The planner against publishers that it was not fitted to.

One constant is fitted: ``reached``, to the least mean over publishers of the mean absolute
logarithm of predicted by published. The interval is that of hierarchical conformal prediction: each
publisher weighs the same, and one more may lie anywhere (Lee, Barber and Willett,
"Distribution-free inference with hierarchical data", 2023).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_smddp.planning import constants
from deepspeed_smddp.planning.step_time import step_time
from deepspeed_smddp.planning.training_job import Job
from planning.published import NotCovered, Row, job_of, peak_share, predicted_value, rows

GRID = [0.64 + 0.01 * i for i in range(31)]  # of "reached"
COVERED = 0.8
Covered = Sequence[tuple[Row, Job]]


def covered() -> tuple[list[tuple[Row, Job]], list[tuple[Row, str]]]:
    """The rows with their jobs, and the others with the reason."""
    jobs, left = [], []
    for row in rows():
        try:
            jobs.append((row, job_of(row)))
        except NotCovered as why:
            left.append((row, str(why)))
    return jobs, left


def error(row: Row, job: Job, values: constants.Values) -> float:
    """Logarithm of predicted by published speed: +0.1 is about 10 % faster than published."""
    ratio = predicted_value(row, job, step_time(job, values).total) / row.value
    return math.log(1 / ratio if row.metric == "step_time_s" else ratio)


@dataclass(frozen=True)
class Errors:
    """By publisher, the errors of its rows at each value of ``grid``."""

    of: Mapping[str, list[list[float]]]
    grid: Sequence[float]

    @staticmethod
    def at(jobs: Covered, grid: Sequence[float] = GRID, **changes: float) -> Errors:
        """With other values of constants."""
        known = {**constants.values(), **changes}
        found: dict[str, list[list[float]]] = {}
        for row, job in jobs:
            line = [error(row, job, {**known, "reached": value}) for value in grid]
            found.setdefault(row.publisher, []).append(line)
        return Errors(found, grid)

    def cost(self, publishers: Sequence[str], at: int) -> float:
        """The mean over publishers of the mean absolute error."""
        means = [statistics.fmean(abs(row[at]) for row in self.of[name]) for name in publishers]
        return statistics.fmean(means)

    def fit(self, publishers: Sequence[str]) -> int:
        """The place in ``grid`` that suits these publishers best."""
        return min(range(len(self.grid)), key=lambda at: self.cost(publishers, at))

    def left_out(self, *without: str) -> dict[str, list[float]]:
        """By publisher, its errors with the fit to the others, all but ``without`` too."""
        found = {}
        for name in self.of:
            others = [other for other in self.of if other != name and other not in without]
            at = self.fit(others)
            found[name] = [row[at] for row in self.of[name]]
        return found

    def interval(self, *without: str) -> float:
        """The factor that covers ``COVERED`` of one more publisher's rows, were they as these.

        Rounded up to a twentieth.
        """
        found = {k: v for k, v in self.left_out(*without).items() if k not in without}
        each = 1 / (len(found) + 1)
        weighted = sorted((abs(e), each / len(of)) for of in found.values() for e in of)
        total = 0.0
        for size, weight in weighted:
            total += weight
            if total >= COVERED - 1e-9:
                return math.ceil(math.exp(size) * 20) / 20
        return math.inf

    def inside(self) -> dict[str, float]:
        """By publisher, the share of its rows inside the interval that the others give."""
        found = {}
        for name, errors in self.left_out().items():
            bound = math.log(self.interval(name))
            found[name] = statistics.fmean(abs(e) <= bound for e in errors)
        return found


def bootstrap(draw: Callable[[Sequence[str]], float], names: Sequence[str]) -> tuple[float, float]:
    """5 and 95 % of what ``draw`` finds for publishers drawn with replacement."""
    chance = random.Random(0)
    found = sorted(draw(chance.choices(names, k=len(names))) for _ in range(200))
    return found[9], found[189]


FACTORS = (0.5, 1.0, 2.0)


def identified(jobs: Covered) -> dict[str, tuple[float, float]]:
    """What a bootstrap over publishers finds for each other constant, fitted beside ``reached``.

    As factors of its value, of ``FACTORS``: the rows determine a constant whose two are alike.
    """
    coarse = GRID[::3]
    known, found = Errors.at(jobs, coarse), {}
    for name, value in constants.values().items():
        if name == "reached":
            continue
        tried = [
            known if factor == 1 else Errors.at(jobs, coarse, **{name: value * factor})
            for factor in FACTORS
        ]

        if tried[0] == tried[-1]:  # no row depends on it
            found[name] = FACTORS[0], FACTORS[-1]
            continue

        def best(names: Sequence[str], tried: Sequence[Errors] = tried) -> float:
            costs = [errors.cost(names, errors.fit(names)) for errors in tried]
            return FACTORS[costs.index(min(costs))]

        found[name] = bootstrap(best, list(known.of))
    return found


def nearest(jobs: Covered, *, others: bool) -> dict[str, list[float]]:
    """The baseline: errors of copying the nearest row's share of the peak, by publisher.

    ``others``: of other publishers only.
    """
    found: dict[str, list[float]] = {}
    for row, job in jobs:
        free = [(r, j) for r, j in jobs if r is not row]
        if others:
            free = [(r, j) for r, j in free if r.publisher != row.publisher]
        copied = min(free, key=lambda of: distance(job, of[1]))
        error_of = math.log(peak_share(*copied) / peak_share(row, job))
        found.setdefault(row.publisher, []).append(error_of)
    return found


def distance(one: Job, other: Job) -> float:
    """How unlike two jobs are: a doubling of a size counts as one difference of a kind."""
    kinds = [(j.scheme.stage, j.scheme.offload, j.recomputation, j.software) for j in (one, other)]
    unlike = sum(a != b for a, b in zip(kinds[0][:3], kinds[1][:3], strict=True))
    unlike += one.cluster.gpu.name != other.cluster.gpu.name
    unlike += kinds[0][3].precision != kinds[1][3].precision
    sizes = [
        (
            j.shape.parameters,
            j.gpus,
            j.shape.sequence,
            j.micro_batch * j.shape.sequence,
            j.scheme.tensor,
            j.scheme.pipeline,
        )
        for j in (one, other)
    ]
    return unlike + sum(abs(math.log2(a / b)) for a, b in zip(*sizes, strict=True))
