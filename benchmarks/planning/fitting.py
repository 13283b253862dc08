"""Fits the planner's constants on the rows that the rule names."""

from __future__ import annotations

import json
import math
from pathlib import Path

from deepspeed_smddp.planning import constants
from deepspeed_smddp.planning.step_time import step_time
from deepspeed_smddp.planning.training_job import Job
from planning.published import NotCovered, Row, job_of, predicted_value, rows

FILE = Path(constants.__file__).with_name("constants.json")


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
    """Predicted against published: +0.1 is 10 % faster than published, for every metric."""
    predicted = predicted_value(row, job, step_time(job, values).total)
    ratio = predicted / row.value
    return (1 / ratio if row.metric == "step_time_s" else ratio) - 1


def fit() -> dict[str, constants.Constant]:
    """The constants with the least robust error of the logarithms; needs scipy."""
    from scipy.optimize import least_squares

    known = constants.constants()
    free = [name for name, of in known.items() if of.origin == "fitted"]
    jobs = [(row, job) for row, job in covered()[0] if row.fitted]
    fixed = {name: of.start for name, of in known.items()}

    def values(point: list[float]) -> dict[str, float]:
        return fixed | {
            name: known[name].low + x * (known[name].high - known[name].low)
            for name, x in zip(free, point, strict=True)
        }

    def residuals(point: list[float]) -> list[float]:
        at = values(point)
        return [math.log1p(error(row, job, at)) for row, job in jobs] + [
            # A weak pull to the start, so that what no row decides stays where it was.
            0.01 * (x - s)
            for x, s in zip(point, start, strict=True)
        ]

    start = [(known[n].start - known[n].low) / (known[n].high - known[n].low) for n in free]
    found = least_squares(
        residuals, start, bounds=(0, 1), loss="soft_l1", f_scale=0.05, max_nfev=300
    )
    best = values(list(found.x))
    return {n: of.model_copy(update={"value": float(f"{best[n]:.5g}")}) for n, of in known.items()}


def save(fitted: dict[str, constants.Constant]) -> None:
    """Writes them where the package reads them."""
    text = json.dumps({n: of.model_dump() for n, of in fitted.items()}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
