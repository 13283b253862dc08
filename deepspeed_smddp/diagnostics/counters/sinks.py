"""Where a snapshot goes: the names of files, who writes them, and how.

A file is replaced by a rename, so that a reader never sees half of it. The temporary file has one
fixed name beside the target; a process that dies leaves at most that one, and the next one uses it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_RANK, _HOST = "{rank}", "{host}"


def writes(name: str, rank: int) -> bool:
    """Whether this process writes the file: each rank, one rank of each host, or rank 0 alone.

    Args:
        name: the setting; it may hold ``{rank}`` and ``{host}``.
        rank: this process's rank in the default group.
    """
    if not name or _RANK in name:
        return bool(name)
    if _HOST in name:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return rank == 0


def path_of(name: str, rank: int, host: str) -> Path:
    """The file that the setting names, on this rank."""
    named = name.replace(_RANK, str(rank)).replace(_HOST, host.replace(os.sep, "_"))
    return Path(named).expanduser()


def replace(path: Path, text: str) -> None:
    """Writes the whole file, or leaves it as it was.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append(path: Path, line: str) -> None:
    """Adds a line in one write.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
