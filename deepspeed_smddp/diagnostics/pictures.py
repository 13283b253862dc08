"""What all pictures share: matplotlib, which is not installed with the package, and the file.

The extra ``plots`` has matplotlib. Each caller gives its own kind of error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_available(error: type[Exception], what: str) -> None:
    """Raises ``error`` if matplotlib is missing; ``what`` is the picture's name: "the chart"."""
    try:
        import matplotlib.figure  # noqa: F401 (whether it is there)
    except ImportError:
        raise error(f"{what} needs matplotlib: pip install 'deepspeed-smddp[plots]'") from None


def save(figure: Any, path: Path, error: type[Exception], **options: Any) -> None:
    """Writes the picture; its format follows from the file's name.

    Raises:
        error: the file can't be written, or matplotlib does not know the format.
    """
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as why:
        raise error(f"{path} can't be written: {why}") from None
