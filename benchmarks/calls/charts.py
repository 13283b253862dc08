"""The figure of a set of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import chart_between_hosts, chart_inside_host
from .call_rows import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Of the rows between hosts; if there are none, of those inside one host."""
    between = [row for row in rows if row.utilisation is not None]
    if between:
        chart_between_hosts.draw(between, path)
    else:
        chart_inside_host.draw(rows, path)
