"""The command line, ``smddp``: one module for each command, with its options and its help.

They import what needs torch only when they run.
"""

from __future__ import annotations

import typer


def failed(problem: object, status: int = 1) -> typer.Exit:
    """Prints why a command ends, unfolded: names of files stay whole. Returns what to raise."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(f"failed  {problem}", "red"))
    return typer.Exit(status)
