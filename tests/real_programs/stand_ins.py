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
from collections.abc import Callable
from typing import Any

import torch


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _module(name: str, **names: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(names, __path__=[])
    sys.modules[name] = made


def _neox_without_cuda() -> None:
    from megatron import initialize  # type: ignore[import-not-found]

    initialize.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )


def _device_count() -> None:
    torch.cuda.device_count = lambda: int(os.environ["LOCAL_SIZE"])


def _no_devices() -> None:
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None


def _long_tensor() -> None:
    torch.cuda.LongTensor = torch.LongTensor


def _random_state() -> None:
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)


def _tensor_cuda() -> None:
    def cuda(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    torch.Tensor.cuda = cuda  # type: ignore[assignment,method-assign]


def _apex_adam() -> None:
    if _missing("apex"):
        _module("apex")
        _module("apex.optimizers", FusedAdam=torch.optim.AdamW)


NEOX = (
    _neox_without_cuda,
    _device_count,
    _no_devices,
    _long_tensor,
    _random_state,
    _tensor_cuda,
    _apex_adam,
)


def _compression() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this DeepSpeed has no deepspeed.compression.compress")

    if _missing("deepspeed.compression.compress"):
        _module("deepspeed.compression")
        _module("deepspeed.compression.compress", init_compression=refuse, redundancy_clean=refuse)


def _torchvision() -> None:
    if _missing("torchvision"):
        importlib.import_module("transformers")  # looks for torchvision, and must not find this
        _module("torchvision")
        _module("torchvision.transforms")
        _module("torchvision.datasets", VisionDataset=object)
        sys.modules["torchvision"].__dict__.update(
            transforms=sys.modules["torchvision.transforms"],
            datasets=sys.modules["torchvision.datasets"],
        )


def _contiguous_attention() -> None:
    from megatron.model import transformer

    original = transformer.CoreAttention.forward

    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        parts = (part.contiguous() for part in (query, key, value))
        return original(self, *parts, *rest, **named)

    transformer.CoreAttention.forward = forward


MEGATRON = (_compression, _torchvision, _contiguous_attention)

OF: dict[str, tuple[Callable[[], None], ...]] = {"neox": NEOX, "megatron": MEGATRON}
