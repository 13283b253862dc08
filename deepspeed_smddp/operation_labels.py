"""Labels of operations in the flight recorder: which part of a model calls a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_numbers: dict[str, int] = {}


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """The operations that the calling thread starts in the context have ``label``.

    The extension must be loaded. Contexts do not nest: an inner one ends the outer one's label.
    """
    from deepspeed_smddp import _C

    number = _numbers.get(label)
    if number is None:
        number = _numbers[label] = _C.label_number(label)
    _C.set_label(number)
    try:
        yield
    finally:
        _C.set_label(0)
