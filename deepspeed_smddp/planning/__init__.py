"""Predicts memory, step time and cost of a training job before it starts (``smddp plan``)."""

from __future__ import annotations

from deepspeed_smddp.errors import CommandError


class PlanError(CommandError):
    """Bad input to ``smddp plan``: one sentence that says what is wrong and what may be there."""

    status = 2
