"""``--json``, which means the same in all commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

JsonFile = Annotated[
    Path | None,
    Option(
        "--json",
        dir_okay=False,
        allow_dash=True,
        help="File for everything, as JSON; - is standard output, without the page.",
    ),
]
