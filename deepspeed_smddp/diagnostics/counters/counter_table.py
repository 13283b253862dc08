"""The counters as a table for people."""

from __future__ import annotations

from rich import filesize
from rich.console import Console
from rich.table import Table

from deepspeed_smddp.diagnostics.counters.snapshot import Snapshot, is_fallback


def show(snapshot: Snapshot, console: Console) -> None:
    """Prints the collectives; what Gloo or NCCL carried out is yellow, and has no times."""
    table = Table(title=f"smddp: collectives of rank {snapshot.rank}", title_justify="left")
    table.add_column("collective")
    table.add_column("path")
    for column in ("calls", "bytes", "time", "wait time"):
        table.add_column(column, justify="right")
    for row in snapshot.collectives:
        foreign = is_fallback(row)
        times = ["-", "-"]
        if not foreign:
            times = [f"{row[key]:.3f} s" for key in ("seconds", "wait_seconds")]
        style = "yellow" if foreign else None
        size = filesize.decimal(row["bytes"])
        table.add_row(
            row["collective"], row["path"], f"{row['calls']:,}", size, *times, style=style
        )
    console.print(table)
    if snapshot.refused:
        console.print(f"{snapshot.refused:,} messages from outside the job were refused.")
