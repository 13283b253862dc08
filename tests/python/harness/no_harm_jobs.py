"""Trains a tiny model with ZeRO-3; returns which functions of DeepSpeed and torch are wrapped."""

from __future__ import annotations

import inspect
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness import zero

LIBRARIES = ("deepspeed", "torch")


def wrapped() -> list[str]:
    """The functions and methods of the libraries that this package has replaced."""
    from deepspeed_smddp.upstream.wrapping import is_wrapped

    found = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in LIBRARIES:
            continue
        for owner in (module, *(c for c in vars(module).values() if inspect.isclass(c))):
            for value in list(vars(owner).values()):
                if inspect.isfunction(value) and is_wrapped(value):
                    found.add(value.__qualname__)
    return sorted(found)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Losses, wrapped functions and the package's sentences, with DeepSpeed's sources or others.

    ``job["known"]`` is False for a DeepSpeed whose functions are all different ones. A
    ``job["version"]`` is what DeepSpeed says that it is.
    """
    import deepspeed

    from deepspeed_smddp.errors import logger
    from deepspeed_smddp.upstream import source

    if not job["known"]:
        for places in source.READ.values():
            places.update({place: {} for place in places})
    deepspeed.__version__ = job.get("version", deepspeed.__version__)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    losses = zero.train(job["backend"], {"stage": 3})
    dist.destroy_process_group()
    return {"losses": losses, "wrapped": wrapped(), "said": said}


def twice(job: dict[str, Any]) -> dict[str, Any]:
    """Trains over Gloo: after training over smddp, beside a group of smddp, or in a new process.

    ``job["before"]`` is "smddp", "group" or "". Returns what the engine over Gloo came to.
    """
    import deepspeed

    import deepspeed_smddp

    if job["before"] == "smddp":
        _train("smddp")
        deepspeed.comm.destroy_process_group()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if job["before"] == "group":
        beside = dist.new_group(backend="smddp")
        dist.barrier(beside)
    made = dist.get_backend()
    before = [row["calls"] for row in deepspeed_smddp.statistics()]
    answer = _train("gloo")
    used = [row["calls"] for row in deepspeed_smddp.statistics()] != before
    deepspeed.comm.destroy_process_group()
    return {**answer, "backend": made, "used": used}


def _train(backend: str) -> dict[str, Any]:
    """Losses, the sizes that the config leaves open, and what the monitor was told."""
    folder = tempfile.mkdtemp()
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    settings = zero.config(backend, {"stage": 3}, csv_monitor=monitor) | {"steps_per_print": 1}
    for key in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        del settings["zero_optimization"][key]
    with zero.engine_of(zero.blocks(), settings) as engine:
        losses = zero.fit(engine)
        sizes = [engine.zero_prefetch_bucket_size(), engine.zero_param_persistence_threshold()]
        overlaps = _overlaps(engine.optimizer)
    told = sorted(path.stem for path in Path(folder).rglob("*.csv"))
    return {"losses": losses, "sizes": sizes, "told": told, "overlaps": overlaps}


def _overlaps(optimizer: Any) -> bool:
    from deepspeed_smddp.deepspeed import overlap

    return optimizer in overlap._overlaps
