"""The libfabric that the extra ``fabric`` installed: found by the record of its package.

Knows nothing of providers. ``_extension`` passes the path to the core, which tries it after a
library that the environment names (``csrc/transport/ofi/loader.h`` has the whole order).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

# What `pip install deepspeed-smddp[fabric]` brings; pyproject.toml has the same name.
PACKAGE = "mpich"
_SONAME = "libfabric.so.1"


def find() -> str:
    """The path of the package's libfabric; empty if it is not installed or has none."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == _SONAME:
            path = Path(str(file.locate()))
            if path.is_file():
                return str(path.resolve())
    return ""
