"""The result of one check of ``smddp doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The consequence of a finding for training."""

    OK = "ok"
    LIMITED = "limited"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    verdict: Verdict = Verdict.OK
