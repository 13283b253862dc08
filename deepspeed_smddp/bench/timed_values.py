"""What the timed calls of ``smddp bench`` move: values like those of training, or those of a file.

Between hosts fewer bytes travel of data that can be coded, so the values decide the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepspeed_smddp.bench.bench_case import BenchError

KINDS = ("weights", "gradients", "random", "zeros")
_MADE = 1 << 20  # elements; buffers repeat them
_ROW = 1024
_MOST = 16 << 20  # elements of a file, or words of four bytes, that are taken


@dataclass(frozen=True)
class TimedValues:
    """``name``: one of ``KINDS``, or a file; ``read``: its values, bytes if it has no type."""

    name: str
    read: torch.Tensor | None = None

    @staticmethod
    def of(name: str) -> TimedValues:
        """What the option names.

        Raises:
            BenchError: it is neither a kind nor a file that can be read.
        """
        return TimedValues(name, None if name in KINDS else _read(Path(name)))

    def elements(self, kind: torch.dtype) -> torch.Tensor:
        """Elements of the type; the bytes of a file without types are such elements."""
        if self.read is None:
            return _made(self.name, kind)
        if self.read.dtype is not torch.uint8:
            return self.read.to(kind)
        return self.read.view(kind)


WEIGHTS = TimedValues("weights")


@cache
def _made(name: str, kind: torch.dtype) -> torch.Tensor:
    """weights: normal, of one scale; gradients: of a scale of its own in each row.

    Coded they shrink as those of a trained transformer do (benchmarks/trained.py).
    """
    random = torch.Generator().manual_seed(0)
    if name == "random":
        bits = torch.randint(0, 256, (_MADE * kind.itemsize,), dtype=torch.uint8, generator=random)
        return bits.view(kind)
    values = torch.zeros(_MADE // _ROW, _ROW)
    if name != "zeros":
        values.normal_(0, 0.02, generator=random)
    if name == "gradients":
        values *= torch.exp2(torch.empty(len(values), 1).normal_(-8, 1, generator=random))
    return values.flatten().to(kind)


def _read(path: Path) -> torch.Tensor:
    try:
        if path.suffix not in _LEAVES:
            with path.open("rb") as file:
                found = bytearray(file.read(4 * _MOST))
            return torch.frombuffer(found, dtype=torch.uint8, count=len(found) // 4 * 4)
        leaves = _LEAVES[path.suffix](path)
        tensors = [
            t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point() and len(t)
        ]
        return torch.cat([t.detach().flatten()[:_MOST].to(tensors[0]) for t in tensors])[:_MOST]
    except Exception as error:  # whatever a library says of a file that is none of its own
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        names = ", ".join(KINDS)
        raise BenchError(f"--data is {path}; it is {names} or a file of values ({why})") from None


def _numpy(path: Path) -> list[Any]:
    import numpy

    return [torch.from_numpy(numpy.load(path))]


def _torch(path: Path) -> list[Any]:
    return tree_leaves(torch.load(path, map_location="cpu", weights_only=True))


def _safetensors(path: Path) -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(path).values())


# By the end of a file's name. Others hold bytes.
_LEAVES = {".npy": _numpy, ".pt": _torch, ".pth": _torch, ".safetensors": _safetensors}
