"""What all pictures share: matplotlib, of the extra ``plots``, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.errors import CommandError


def check_available(what: str, path: Path) -> None:
    """Whether a picture can be made; ``what`` it is: "the chart".

    Raises:
        CommandError: matplotlib is missing; or it does not know the format, or there is no folder
            for the file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise CommandError(
            f"{what} needs matplotlib: pip install 'deepspeed-smddp[plots]'"
        ) from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise output_files.OutputError(
            f"{path} can't be written: the end of the name is its format, one of {', '.join(known)}"
        )
    output_files.check_writable([path])


def save(figure: Any, path: Path, **options: Any) -> None:
    """Writes the picture; its format follows from the file's name.

    Raises:
        CommandError: the file can't be written, or matplotlib does not know the format.
    """
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as why:
        raise CommandError(f"{path} can't be written: {why}") from None
