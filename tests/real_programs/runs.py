"""One run of a program: its losses, what the ledger counted, and what is checked of both."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

RANKS = 4
HOSTS = 2
STEPS = 20
CHECKPOINT = 10  # the step whose checkpoint a resumed run loads
REFERENCE = "gloo"

# bf16 gradients of four ranks are summed in another order, and rounded once by smddp, at each
# addition by Gloo. fp32: the order alone.
TOLERANCE = {"bf16": 5e-4, "fp32": 1e-5}


@dataclass(frozen=True)
class Case:
    """One way to divide the model over the ranks."""

    name: str
    stage: int  # of ZeRO
    tensor: int = 1
    pipe: int = 1
    precision: str = "bf16"
    resume: bool = True

    @property
    def title(self) -> str:
        parts = [f"ZeRO-{self.stage}"]
        parts += [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += [f"PP {self.pipe}"] if self.pipe > 1 else []
        return ", ".join([*parts, self.precision])


@dataclass
class Run:
    """What one run gave."""

    case: str
    deepspeed: str
    backend: str
    resumed: bool
    losses: dict[int, float] = field(default_factory=dict)
    ledger: list[dict[str, Any]] = field(default_factory=list)  # rows of rank 0
    command: str = ""

    def __post_init__(self) -> None:
        self.losses = {int(step): loss for step, loss in self.losses.items()}  # JSON has strings

    @property
    def kind(self) -> str:
        return self.backend + ", resumed" * self.resumed

    def calls(self, collective: str, *, own: bool = True) -> int:
        """How often rank 0 called ``collective`` on smddp's own paths, or on the fallback's."""
        return sum(
            row["calls"]
            for row in self.ledger
            if row["collective"] == collective and row["path"].startswith("fallback:") is not own
        )


def check(run: Run, reference: Run, case: Case) -> list[str]:
    """What is wrong with a run over smddp; ``reference`` is the run over Gloo."""
    wrong = []
    wanted = set(range((CHECKPOINT if run.resumed else 0) + 1, STEPS + 1))
    if set(run.losses) != wanted:
        wrong.append(f"it logged the losses of steps {sorted(run.losses)}")
    for step in sorted(wanted & set(run.losses) & set(reference.losses)):
        expected = reference.losses[step]
        if not math.isclose(run.losses[step], expected, rel_tol=TOLERANCE[case.precision]):
            wrong.append(f"step {step}: loss {run.losses[step]:.6f}, Gloo's is {expected:.6f}")
    if set(reference.losses) != set(range(1, STEPS + 1)):
        wrong.append(f"Gloo's run logged the losses of steps {sorted(reference.losses)}")
    elif min(reference.losses[STEPS - 1], reference.losses[STEPS]) > reference.losses[1] - 0.3:
        wrong.append("nothing was learnt")
    messages = ["send", "recv"] * (case.pipe > 1)
    for collective in (
        "all_gather",
        "all_reduce",
        *["reduce_scatter"] * (case.stage == 3),
        *messages,
    ):
        if not run.calls(collective):
            wrong.append(f"smddp's ledger has no {collective}")
    for collective in sorted({row["collective"] for row in run.ledger}):
        if run.calls(collective, own=False):
            wrong.append(f"{collective} went to the fallback")
    return wrong


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of two runs' losses, over the steps that both have."""
    common = set(run.losses) & set(reference.losses)
    return max(abs(run.losses[s] - reference.losses[s]) / reference.losses[s] for s in common)
