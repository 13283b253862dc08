"""Loads the compiled module ``_C``; if it can't be loaded, the error says why in one sentence."""

from __future__ import annotations

import importlib
import sys

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_NAME = "deepspeed_smddp._C"


def built_for_torch() -> str | None:
    """The torch version that the extension was built for; None if it was never built."""
    try:
        info = importlib.import_module("deepspeed_smddp._build_info")
    except ModuleNotFoundError:
        return None
    return str(info.TORCH_VERSION)


def load() -> None:
    """Makes ``deepspeed_smddp._C`` importable; the caller imports it next.

    Raises:
        ImportError: the extension is missing, or it was built for another torch. torch's C++
            interface changes with every release, so that loading would fail with an undefined
            symbol.
    """
    if _NAME in sys.modules:
        return
    built = built_for_torch()
    running = str(torch.__version__)
    if built is not None and built != running:
        raise ImportError(
            f"deepspeed_smddp was built for torch {built} but runs under torch {running}; "
            f"rebuild it in its source tree with `{REBUILD}`"
        )
    try:
        importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
        raise ImportError(
            "the compiled module deepspeed_smddp._C is missing; "
            f"build it in its source tree with `{REBUILD}`"
        ) from None
    except ImportError as error:
        raise ImportError(
            f"the compiled module deepspeed_smddp._C, built for torch {built or 'unknown'}, does "
            f"not load under torch {running} ({error}); rebuild it in its source tree with "
            f"`{REBUILD}`"
        ) from error
