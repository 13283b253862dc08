"""What ZeRO-3 asks of a program: all ranks run the same modules."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_smddp.diagnose.report.job import Job

ALIKE = "ZeRO-3 needs all ranks to run the same modules in the same order"
_GENERATES = {"generate", "_sample", "_beam_search", "_greedy_search"}


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
