"""What all pictures share: matplotlib, of the extra ``plots``, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_smddp.errors import CommandError


def check_available(what: str) -> None:
    """Raises CommandError if matplotlib is missing; ``what`` is the picture: "the chart"."""
    try:
        import matplotlib.figure  # noqa: F401 (whether it is there)
    except ImportError:
        raise CommandError(
            f"{what} needs matplotlib: pip install 'deepspeed-smddp[plots]'"
        ) from None


def save(figure: Any, path: Path, **options: Any) -> None:
    """Writes the picture; its format follows from the file's name.

    Raises:
        CommandError: the file can't be written, or matplotlib does not know the format.
    """
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as why:
        raise CommandError(f"{path} can't be written: {why}") from None
