"""One possible cause of a hang, and how it weighs against others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Weight(IntEnum):
    """How likely a cause of this kind is the first one; the least number comes first."""

    DIFFERENT_CALLS_RAISED = 5
    MISMATCH_ERROR = 10
    OWN_ERROR = 20
    GONE = 30
    DIFFERENT_CALLS = 40
    CROSSED_GROUPS = 50
    NO_DUMP = 60
    DIFFERENT_LABELS = 70
    LATE = 80
    TRANSFER = 90
    LATE_BEHIND_OTHERS = 100
    LATER_ERROR = 110
    NOTE = 120
    HEALTHY = 130


@dataclass(frozen=True)
class Cause:
    """``text`` is one sentence or two, the subject first; ``ranks`` are the ones to look at.

    ``remedy`` says what to do, "" if the dumps do not tell.
    """

    weight: Weight
    text: str
    ranks: tuple[int, ...] = ()
    remedy: str = ""
