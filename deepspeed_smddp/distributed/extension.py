"""Loads the compiled module ``_C``; if it can't be loaded, the error says why in one sentence.

Any torch of the minor version that the module was built with can load it: CPU-only or CUDA, and any
bug-fix release. Between minor versions torch's C++ classes change.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed_smddp import _C

    core = _C

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_NAME = "deepspeed_smddp._C"
# What `pip install deepspeed-smddp[fabric]` brings; pyproject.toml has the same name.
LIBFABRIC_PACKAGE = "mpich"


def built_for_torch() -> str | None:
    """The torch version that the extension was built for; None if it was never built."""
    try:
        info = importlib.import_module("deepspeed_smddp._build_info")
    except ModuleNotFoundError:
        return None
    return str(info.TORCH_VERSION)


def __getattr__(name: str) -> Any:
    """``core``: the compiled module, loaded at its first use as :func:`load` does."""
    if name != "core":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return sys.modules[_NAME]


def is_loaded() -> bool:
    """Whether this process has the compiled module; a group has loaded it."""
    return _NAME in sys.modules


def load() -> None:
    """Makes ``deepspeed_smddp._C`` importable; the caller imports it next, or uses ``core``.

    Raises:
        ImportError: the extension is missing, or it was built for another minor version of torch,
            so that loading would fail with an undefined symbol.
    """
    if is_loaded():
        return
    built = built_for_torch()
    running = str(torch.__version__)
    if built is not None and minor(built) != minor(running):
        raise ImportError(
            f"deepspeed_smddp was built for torch {built} but runs under torch {running}; install "
            f"the wheel for torch {minor(running)}, or rebuild it in its source tree with "
            f"`{REBUILD}`"
        )
    try:
        module = importlib.import_module(_NAME)
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
    module.set_packaged_libfabric(packaged_libfabric())


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def packaged_libfabric() -> str:
    """The path of the libfabric that the extra ``fabric`` installed; empty if there is none.

    The core tries it after a library that the environment names (``csrc/transport/ofi/loader.h``
    has the whole order).
    """
    try:
        files = metadata.files(LIBFABRIC_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ""
    paths = [Path(str(file.locate())) for file in files if file.name == "libfabric.so.1"]
    return next((str(path.resolve()) for path in paths if path.is_file()), "")
