"""Trains a tiny model with ZeRO-3; returns which functions of DeepSpeed and torch are wrapped."""

from __future__ import annotations

import inspect
import logging
import sys
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
