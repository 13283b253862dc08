"""The four trainings of a cell, and what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .ranks import Interpreter, train

STEPS = 4
SAVE_AT = 2
EQUAL = "equal"


def run_phases(interpreter: Interpreter, folder: Path) -> dict[str, Any]:
    """The outcome of each training, by name.

    ``alone``: over Gloo, without this package; "trains", or DeepSpeed's error. ``beside``: over
    Gloo, with this package installed. ``smddp``: over smddp. ``resume``: over smddp, from the
    checkpoint that ``smddp`` wrote. The last three are "equal" if their losses are those of
    ``alone``, bit by bit. A training that needs one that failed is left out.
    """
    answers, error = train(interpreter, folder, [{"backend": "gloo", "steps": STEPS}], beside=False)
    if error:
        return {"alone": error}
    if answers[0]["autoloaded"]:
        return {"alone": "this package was loaded"}
    losses: list[float] = answers[0]["losses"]
    found: dict[str, Any] = {"alone": "trains", "losses": losses}
    jobs = (
        ("beside", losses, {"backend": "gloo"}),
        ("smddp", losses, {"backend": "smddp", "save_at": SAVE_AT}),
        ("resume", losses[SAVE_AT:], {"backend": "smddp", "load": True}),
    )
    answers, error = train(interpreter, folder, [{**job, "steps": STEPS} for *_, job in jobs])
    for (name, wanted, _), answer in zip(jobs, answers, strict=False):
        found[name] = _compared(wanted, answer)
        found.update({key: answer[key] for key in ("features", "collectives") if key in answer})
    if error:
        found[jobs[len(answers)][0]] = error
    return found


def _compared(losses: list[float], answer: dict[str, Any]) -> str:
    if not answer["autoloaded"]:
        return "this package was not loaded"
    if answer["losses"] == losses:
        return EQUAL
    return f"losses {answer['losses']} in place of {losses}"
