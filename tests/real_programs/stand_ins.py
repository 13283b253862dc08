"""What stands in, on a machine without GPUs, for the calls of CUDA that the programs make.

Each is made only in the ranks of these runs (``cpu_rank``), never in the product. The programs'
files stay as they are. Their pages in docs/ list the stand-ins with their reasons.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from typing import Any

import torch


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _module(name: str, **names: Any) -> types.ModuleType:
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(names, __path__=[])
    return made


def neox() -> None:
    from megatron import initialize

    initialize.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    cuda: Any = torch.cuda
    cuda.device_count = lambda: int(os.environ["LOCAL_SIZE"])
    cuda.set_device = lambda device: None
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda device=None: None
    cuda.LongTensor = torch.LongTensor
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    if _missing("apex"):
        _module("apex")
        _module("apex.optimizers", FusedAdam=torch.optim.AdamW)


def megatron() -> None:
    if _missing("deepspeed.compression.compress"):
        _module("deepspeed.compression")
        _module(
            "deepspeed.compression.compress", init_compression=_refuse, redundancy_clean=_refuse
        )
    if _missing("torchvision"):
        importlib.import_module("transformers")  # looks for torchvision, and must not find this
        transforms = _module("torchvision.transforms")
        datasets = _module("torchvision.datasets", VisionDataset=object)
        _module("torchvision", transforms=transforms, datasets=datasets)
    from megatron.model import transformer

    original = transformer.CoreAttention.forward

    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        parts = (part.contiguous() for part in (query, key, value))
        return original(self, *parts, *rest, **named)

    transformer.CoreAttention.forward = forward


def _refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("this DeepSpeed has no deepspeed.compression.compress")


OF = {"neox": neox, "megatron": megatron}
