"""A progress bar with the latest loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def shown(steps: int, here: bool) -> Iterator[Callable[[float], None]]:
    """Yields a function to call with the loss after each of ``steps`` steps; draws if ``here``."""
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not here) as progress:
        bar = progress.add_task("", total=steps, loss=float("nan"))
        yield lambda loss: progress.update(bar, advance=1, loss=loss)
