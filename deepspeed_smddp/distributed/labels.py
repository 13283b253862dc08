"""Labels of operations in the flight recorder: which part of a model calls a collective."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from deepspeed_smddp.distributed import extension

# Between a label and each name of a parameter, in the recorder's text.
_SEPARATOR = "\n"
# The recorder keeps each text until the process ends. A model that gathers ever other sets of its
# parameters gets labels without their names from so many on, about 10 MB.
_MOST_TEXTS = 4096
_texts = 0


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


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _number(label: str, parameters: tuple[str, ...]) -> int:
    global _texts
    if _texts >= _MOST_TEXTS:
        return _number(label, ()) if parameters else 0
    _texts += 1
    return extension.core.label_number(_SEPARATOR.join((label, *parameters)))


def split(text: str) -> tuple[str, list[str]]:
    """The label and the names of parameters in a text of the recorder."""
    label, *parameters = text.split(_SEPARATOR)
    return label, parameters
