"""``smp.save_checkpoint``, ``resume_from_checkpoint``, ``save`` and ``load``.

A checkpoint is DeepSpeed's, or one file with the whole model.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from deepspeed_smddp.compat import modelparallel, refuse

_KEY = "smp_user_content"


def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves the model and the optimizer; every rank must call it.

    Args:
        path: a directory.
        tag: the checkpoint's name in the directory.
        partial: True: the shards of model and optimizer, from which any number of ranks can resume.
            False: rank 0 writes all of the model's parameters to the file ``path/tag``.
        model: default: the job's one ``smp.DistributedModel``.
        optimizer: has no effect; the optimizer is saved with the model.
        user_content: the value that ``resume_from_checkpoint`` returns.
        translate_if_full: has no effect, because parameters keep the model's own names.
        num_kept_partial_checkpoints: the number of checkpoints to keep; older ones are removed.
    """
    model = model or modelparallel.state.model
    directory = Path(path)
    if not partial:
        content = {"model": model.state_dict(gather_to_rank0=True), "user_content": user_content}
        if modelparallel.rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(content, directory / tag)
        modelparallel.barrier()
        return
    model.engine.save_checkpoint(path, tag=tag, client_state={_KEY: user_content})
    modelparallel.barrier()
    if num_kept_partial_checkpoints is not None and modelparallel.rank() == 0:
        kept = [p for p in directory.iterdir() if any(p.glob("*model_states.pt"))]
        kept.sort(key=lambda p: p.stat().st_mtime_ns)
        for old in kept[: max(0, len(kept) - num_kept_partial_checkpoints)]:
            shutil.rmtree(old)


def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Any = None,
) -> Any:
    """Loads into the job's model and optimizer after both are wrapped; every rank must call it.

    Args:
        path: a directory.
        tag: the checkpoint's name in the directory; None: the newest.
        partial: the value given to ``save_checkpoint``. A full checkpoint must be loaded before
            ``smp.DistributedOptimizer`` is made.
        strict: for a full checkpoint: no parameter may be missing.
        load_optimizer: also load the optimizer's state.
        load_sharded_optimizer_state: if False, the optimizer's state is not loaded either.
        translate_function: for a full checkpoint: receives the dictionary of parameters, and
            returns the dictionary to load.

    Returns:
        The ``user_content`` that was saved.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        pickle.UnpicklingError: a full checkpoint holds objects of a class that was not allowed, as
            in :func:`load`.
    """
    model = modelparallel.state.model
    if not partial:
        if tag is None:
            refuse("the newest full checkpoint", "name it by tag=")
        content = _read(Path(path) / tag, "cpu")
        parameters = content["model"]
        if translate_function is not None:
            parameters = translate_function(parameters)
        model.load_state_dict(parameters, strict=strict)
        return content["user_content"]
    with_optimizer = load_optimizer and load_sharded_optimizer_state
    found, state = model.engine.load_checkpoint(
        path, tag=tag, load_optimizer_states=with_optimizer, load_module_strict=strict
    )
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint {tag or ''} in {path}")
    return state.get(_KEY)


def save(thing: Any, path: str, partial: bool = True, **kwargs: Any) -> None:
    """``torch.save``; ``partial``: a file per rank, with its rank in the name; else rank 0 only."""
    if partial:
        torch.save(thing, f"{path}_{modelparallel.rank()}")
    elif modelparallel.rank() == 0:
        torch.save(thing, path)


def load(path: str, map_location: Any = None, partial: bool = True, **kwargs: Any) -> Any:
    """``torch.load`` of a file that :func:`save` wrote.

    Raises:
        pickle.UnpicklingError: the file holds objects of a class that is neither a tensor, a number
            nor a container, and that ``torch.serialization.add_safe_globals`` has not allowed.
            Such objects run code of the file when they are read.
    """
    return _read(f"{path}_{modelparallel.rank()}" if partial else path, map_location or "cpu")


def _read(path: str | Path, map_location: Any) -> Any:
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{path} holds objects that could run code when they are read; if you trust the file, "
            f"allow their classes with torch.serialization.add_safe_globals: {error}"
        ) from error
