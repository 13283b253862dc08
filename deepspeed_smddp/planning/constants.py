"""The constants of the planner: what was fitted, within which bounds, and what each one means.

``constants.json`` is written by ``benchmarks/planner.py --fit``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict

# Name -> value: what the formulas take.
Values = Mapping[str, float]


class Constant(BaseModel):
    """One constant. ``start`` is where the fit began; low, high: its bounds; all in ``unit``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    meaning: str
    unit: str
    origin: Literal["fitted", "given"]
    value: float
    start: float
    low: float
    high: float


@cache
def constants() -> dict[str, Constant]:
    """All constants by name."""
    text = resources.files("deepspeed_smddp.planning").joinpath("constants.json").read_text("utf-8")
    return {name: Constant.model_validate(of) for name, of in json.loads(text).items()}


@cache
def values() -> Values:
    """The values alone."""
    return {name: constant.value for name, constant in constants().items()}
