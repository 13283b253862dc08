"""Names of ZeRO-3's parameters, for the labels of the operations that gather and reduce them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_known: dict[tuple[str, int, int, int], tuple[str, tuple[str, ...]]] = {}


def described(params: Sequence[Any], what: str = "") -> tuple[str, tuple[str, ...]]:
    """The label of an operation on parameters, and their names.

    The label has the smallest module that holds all of them.

    ``what`` of the module it moves: "" for the parameters, "gradients of ".

    DeepSpeed's engine knows the names once it is made; before, the label has their numbers, and
    there are no names.
    """
    key = (what, params[0].ds_id, params[-1].ds_id, len(params))
    known = _known.get(key)
    if known is not None:
        return known
    count = f"{len(params)} parameter{'s' if len(params) > 1 else ''}"
    names = [_name_of()(param) for param in params]
    if "unknown" in names:
        return f"ZeRO-3 {what}parameter {params[0].ds_id} of the model ({count})", ()
    _known[key] = f"ZeRO-3 {what}module {_module_of(names)} ({count})", tuple(names)
    return _known[key]


def _module_of(names: Sequence[str]) -> str:
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or "(the model itself)"


@cache
def _name_of() -> Callable[[Any], str]:
    try:
        from deepspeed.utils.debug import debug_param2name
    except ImportError:  # DeepSpeed moved it
        return lambda param: "unknown"
    names: Callable[[Any], str] = debug_param2name
    return names
