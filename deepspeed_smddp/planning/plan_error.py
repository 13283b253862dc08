"""The error of a question that the planner can't answer."""

from __future__ import annotations


class PlanError(ValueError):
    """Bad input to ``smddp plan``: one sentence that says what is wrong and what may be there."""
