"""The trainings of a cell, and what is compared."""

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
    ``alone``, bit by bit. A training that needs one that failed is left out. ``resume alone``, if
    ``resume`` fails: the outcome of a checkpoint and a resume over Gloo, without this package.
    """
    gloo = {"backend": "gloo", "steps": STEPS}
    answers, error = train(interpreter, folder, [gloo], beside=False)
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
    if found.get("resume", EQUAL) != EQUAL:
        found["resume alone"] = _resume_alone(interpreter, folder, losses)
    return found


def run_fsdp2(interpreter: Interpreter, folder: Path) -> dict[str, Any]:
    """The same for FSDP2, which is torch's: ``fsdp2 alone``, ``fsdp2``, ``fsdp2 collectives``.

    ``fsdp2 backward``: whether reductions ran during the backward pass.
    """
    job = {"program": "fsdp2", "backend": "gloo", "steps": STEPS}
    answers, error = train(interpreter, folder, [job], beside=False)
    if error:
        return {"fsdp2 alone": error}
    losses = answers[0]["losses"]
    answers, error = train(interpreter, folder, [{**job, "backend": "smddp"}])
    if error:
        return {"fsdp2 alone": "trains", "fsdp2": error}
    return {
        "fsdp2 alone": "trains",
        "fsdp2": _compared(losses, answers[0]),
        "fsdp2 backward": answers[0]["features"]["fsdp backward"],
        "fsdp2 collectives": answers[0]["collectives"],
    }


def _resume_alone(interpreter: Interpreter, folder: Path, losses: list[float]) -> str:
    jobs = ({"save_at": SAVE_AT}, {"load": True})
    gloo = {"backend": "gloo", "steps": STEPS, "folder": str(folder / "gloo")}
    answers, error = train(interpreter, folder, [{**gloo, **job} for job in jobs], beside=False)
    if error:
        return error
    return EQUAL if answers[1]["losses"] == losses[SAVE_AT:] else "other losses"


def _compared(losses: list[float], answer: dict[str, Any]) -> str:
    if not answer["autoloaded"]:
        return "this package was not loaded"
    if answer["losses"] == losses:
        return EQUAL
    return f"losses {answer['losses']} in place of {losses}"
