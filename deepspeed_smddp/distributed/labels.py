"""Labels of operations in the flight recorder: which part of a model calls a collective."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from deepspeed_smddp.distributed import extension

# Between a label and each name of a parameter, in the recorder's text.
_SEPARATOR = "\n"


@contextlib.contextmanager
def labelled(label: str, parameters: Sequence[str] = (), digest: int = 0) -> Iterator[None]:
    """The operations that the calling thread starts in the context have ``label``.

    ``parameters`` are the names of those that they move, if they are known. ``digest``, of 32 bits,
    stands for them and is equal on all ranks; an operation whose ranks have unequal ones fails.
    Contexts do not nest: an inner one ends the outer one's label.
    """
    extension.core.set_label(_number(label, tuple(parameters)), digest)
    try:
        yield
    finally:
        extension.core.set_label(0)


@functools.lru_cache(maxsize=1024)
def _number(label: str, parameters: tuple[str, ...]) -> int:
    return extension.core.label_number(_SEPARATOR.join((label, *parameters)))


def split(text: str) -> tuple[str, list[str]]:
    """The label and the names of parameters in a text of the recorder."""
    label, *parameters = text.split(_SEPARATOR)
    return label, parameters
