"""One thing that a rank knows about itself, and that ``smddp doctor`` compares between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepspeed_smddp.diagnostics.doctor.finding import Verdict

# Ranks of the whole job must agree, or those of one host; or the value is only shown.
Scope = Literal["job", "host", "own"]


@dataclass(frozen=True)
class Fact:
    """A name, its value as text, and what follows if ranks have different values.

    ``detail`` is shown after the value and not compared.
    """

    name: str
    value: str
    scope: Scope = "job"
    if_different: Verdict = Verdict.LIMITED
    detail: str = ""

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return f"{self.value} ({self.detail})" if self.detail else self.value
