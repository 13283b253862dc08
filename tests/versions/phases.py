"""The trainings of a cell, each by two ranks, and what is compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import jobs

from .cells import EQUAL

RANKS = 2
SECONDS = 400.0  # for all trainings of one call; they take 10 to 100 on two busy cores
STEPS = 4
SAVE_AT = 2
_PROGRAM = Path(__file__).with_name("training.py")
_OURS = ("SMDDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "PYTHON", "VIRTUAL_ENV")

Answer = dict[str, Any]


class Interpreter(NamedTuple):
    """A Python, and folders that its imports search first."""

    python: Path
    path: tuple[Path, ...] = ()


def train(
    interpreter: Interpreter,
    folder: Path,
    trainings: Sequence[Mapping[str, Any]],
    *,
    beside: bool = True,
) -> tuple[list[Answer], str]:
    """The answers of rank 0 (``training.py``), and the error that ended the last training, or "".

    Args:
        interpreter: runs the ranks.
        folder: for the checkpoint, the output of the ranks and the answers.
        trainings: ``program`` (default: zero3), ``backend``, ``steps``, ``save_at``, ``load``.
        beside: False: torch loads no backend by an entry point, as if this package were not there.
    """
    answers = [folder / f"answer{number}.json" for number in range(len(trainings))]
    common = {"program": "zero3", "folder": str(folder / "checkpoint"), "steps": STEPS}
    common |= {"save_at": None, "load": False}
    whole = []
    for answer, training in zip(answers, trainings, strict=True):
        answer.unlink(missing_ok=True)
        whole.append({**common, "answer": str(answer), "port": jobs.free_port(), **training})
    command = [str(interpreter.python), str(_PROGRAM), json.dumps(whole)]
    environments = [_environment(interpreter, rank, beside) for rank in range(RANKS)]
    log = folder / "ranks.txt"
    late = ""
    try:
        jobs.run(command, folder, log, SECONDS, *environments)
    except jobs.JobError as error:
        late = str(error).splitlines()[-1]
    found = [json.loads(a.read_text(encoding="utf-8")) for a in answers if a.exists()]
    if len(found) == len(trainings):
        return found, ""
    return found, late if late.startswith("no end") else reason(log)


def reason(log: Path) -> str:
    """The error that the output of the ranks ends with."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    if not errors:
        return "a rank ended without an error message"
    return re.sub(r"/\S*/site-packages/", "", errors[-1])[:300].rstrip()


def _environment(interpreter: Interpreter, rank: int, beside: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {
        **kept,
        "PATH": f"{interpreter.python.parent}:{kept.get('PATH', '')}",
        "PYTHONPATH": ":".join(map(str, interpreter.path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({} if beside else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    }


def run_zero3(interpreter: Interpreter, folder: Path) -> Answer:
    """The outcome of each training, by name.

    ``alone``: over Gloo, without this package; "trains", or DeepSpeed's error. ``beside``: over
    Gloo, with this package installed. ``smddp``: over smddp. ``resume``: over smddp, from the
    checkpoint that ``smddp`` wrote. The last three are "equal" if their losses are those of
    ``alone``, bit by bit. A training that needs one that failed is left out. ``resume alone``, if
    ``resume`` fails: the outcome of a checkpoint and a resume over Gloo, without this package.
    """
    answers, error = train(interpreter, folder, [{"backend": "gloo"}], beside=False)
    if error:
        return {"alone": error}
    if answers[0]["autoloaded"]:
        return {"alone": "this package was loaded"}
    losses: list[float] = answers[0]["losses"]
    found: Answer = {"alone": "trains", "losses": losses}
    trainings = {
        "beside": {"backend": "gloo"},
        "smddp": {"backend": "smddp", "save_at": SAVE_AT},
        "resume": {"backend": "smddp", "load": True},
    }
    answers, error = train(interpreter, folder, list(trainings.values()))
    for name, answer in zip(trainings, answers, strict=False):
        found[name] = compared(losses[SAVE_AT:] if name == "resume" else losses, answer)
        found.update({key: answer[key] for key in ("features", "collectives") if key in answer})
    if error:
        found[list(trainings)[len(answers)]] = error
    if found.get("resume", EQUAL) != EQUAL:
        gloo = {"backend": "gloo", "folder": str(folder / "gloo")}
        pair = [{**gloo, "save_at": SAVE_AT}, {**gloo, "load": True}]
        answers, error = train(interpreter, folder, pair, beside=False)
        same = not error and answers[1]["losses"] == losses[SAVE_AT:]
        found["resume alone"] = error or (EQUAL if same else "other losses")
    return found


def run_fsdp2(interpreter: Interpreter, folder: Path) -> Answer:
    """The same for FSDP2, which is torch's: ``fsdp2 alone``, ``fsdp2``, ``fsdp2 collectives``.

    ``fsdp2 backward``: whether reductions ran during the backward pass.
    """
    gloo = {"program": "fsdp2", "backend": "gloo"}
    alone, error = train(interpreter, folder, [gloo], beside=False)
    if error:
        return {"fsdp2 alone": error}
    ours, error = train(interpreter, folder, [{**gloo, "backend": "smddp"}])
    if error:
        return {"fsdp2 alone": "trains", "fsdp2": error}
    return {
        "fsdp2 alone": "trains",
        "fsdp2": compared(alone[0]["losses"], ours[0]),
        "fsdp2 backward": ours[0]["features"]["fsdp backward"],
        "fsdp2 collectives": ours[0]["collectives"],
    }


def compared(losses: list[float], answer: Answer) -> str:
    """Whether the losses are equal, and this package was loaded."""
    if not answer["autoloaded"]:
        return "this package was not loaded"
    if answer["losses"] == losses:
        return EQUAL
    return f"losses {answer['losses']} in place of {losses}"
