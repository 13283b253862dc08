"""Writes a file so that no reader sees half of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Writes the whole file, or leaves it as it was. Of two that write at once, the last remains.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
