"""What ZeRO-3 asks of a program: all ranks run the same modules."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_smddp.diagnostics.report import library
from deepspeed_smddp.diagnostics.report.job import Job, Stall
from deepspeed_smddp.diagnostics.report.wording import ZERO3

ALIKE = "ZeRO-3 needs all ranks to run the same modules in the same order"
_ZERO = "deepspeed.runtime.zero."
_GENERATES = {"generate", "_sample", "_beam_search", "_greedy_search"}


def label(job: Job, stall: Stall) -> str:
    """What the ranks that wait run of a model: the label of the operation, or else of their stacks.

    "" if it is nothing of ZeRO-3's.
    """
    if stall.operation.label.startswith(ZERO3):
        return stall.operation.label
    found = (module_run(job, rank) for rank in stall.waiting)
    return next((f"{ZERO3} module {name}" for name in found if name), "")


def module_run(job: Job, rank: int) -> str:
    """The class of the innermost module for which ZeRO-3 works in a thread of the rank."""
    dump = job.dumps.get(rank)
    for stack in dump.stacks if dump is not None else []:
        at = [i for i, f in enumerate(stack.frames) if library.module(f).startswith(_ZERO)]
        owners = [f.owner for f in stack.frames[: at[-1]] if f.owner] if at else []
        if owners:
            return owners[-1]
    return ""


def remedy(job: Job, ranks: Iterable[int]) -> str:
    """``synced_gpus=True`` if one of the ranks generates text, and else what to change."""
    if any(generates(job, rank) for rank in ranks):
        return (
            "pass synced_gpus=True to generate(), so that ranks that are done run the model until "
            "all are"
        )
    return (
        "run the module on all ranks: take it out of `if rank == 0` and of loops of unlike length"
    )


def generates(job: Job, rank: int) -> bool:
    """If a thread of the rank is within generate() of a model."""
    dump = job.dumps.get(rank)
    if dump is None:
        return False
    return any(frame.function in _GENERATES for stack in dump.stacks for frame in stack.frames)
