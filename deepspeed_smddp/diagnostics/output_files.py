"""The files that the commands write, refused before the work that fills them.

Pictures are of matplotlib, of the extra ``plots``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepspeed_smddp.errors import CommandError
from deepspeed_smddp.whole_file import replace

# As a path of ``--json``: standard output, in place of the page.
STANDARD_OUTPUT = Path("-")


class OutputError(CommandError):
    """A file that can't be written, and why, in one sentence."""

    status = 2


def check_writable(paths: Iterable[Path | None]) -> None:
    """Says before the work what its end would say; of no paths, and of standard output, nothing.

    Raises:
        OutputError: a folder is missing or refuses new files.
    """
    for path in paths:
        if path in (None, STANDARD_OUTPUT):
            continue
        folder = path.parent
        if not folder.is_dir():
            raise OutputError(f"{path} can't be written: there is no folder {folder}")
        if path.is_dir() or not os.access(folder, os.W_OK):
            raise OutputError(f"{path} can't be written: it is a folder, or {folder} is read-only")


def write(path: Path | None, text: str) -> None:
    """Writes the whole file; an earlier one stays whole if that fails. Without a path, nothing.

    Raises:
        OutputError: the file can't be written.
    """
    if path is None:
        return
    if path == STANDARD_OUTPUT:
        print(text, flush=True)
        return
    try:
        replace(path, text if text.endswith("\n") else text + "\n")
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}") from None


def write_json(path: Path | None, value: Any) -> None:
    """The same of a value as JSON."""
    write(path, json.dumps(value, indent=1))


def check_picture(what: str, path: Path | None) -> None:
    """Whether a picture can be made; ``what`` it is: "the chart". Without a path, nothing.

    Raises:
        CommandError: matplotlib is missing; or it does not know the format, or there is no folder
            for the file.
    """
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise CommandError(
            f"{what} needs matplotlib: pip install 'deepspeed-smddp[plots]'"
        ) from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise OutputError(
            f"{path} can't be written: the end of the name is its format, one of {', '.join(known)}"
        )
    check_writable([path])


def save_picture(figure: Any, path: Path, **options: Any) -> None:
    """Writes the picture; its format follows from the file's name.

    Raises:
        CommandError: the file can't be written, or matplotlib does not know the format.
    """
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as why:
        raise CommandError(f"{path} can't be written: {why}") from None
