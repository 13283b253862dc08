"""The report of a run: losses per step, their curve, and the table of its collectives."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table

SHARDED_COLLECTIVES = ("allgather", "reducescatter", "allreduce")


class Row(TypedDict):
    step: int
    loss: float
    held_out: float | None
    learning_rate: float
    tokens_per_second: float
    wait_share: float | None


FIELDS = tuple(Row.__annotations__)


def write_losses(path: Path, rows: list[Row]) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("w", newline="") as f:
        writer = csv.DictWriter(f, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def read_losses(path: Path, last_step: int) -> list[Row]:
    """The rows up to `last_step`; later steps are not in the checkpoint and run again."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        rows = [
            Row(
                step=int(r["step"]),
                loss=float(r["loss"]),
                held_out=float(r["held_out"]) if r["held_out"] else None,
                learning_rate=float(r["learning_rate"]),
                tokens_per_second=float(r["tokens_per_second"]),
                wait_share=float(r["wait_share"]) if r["wait_share"] else None,
            )
            for r in csv.DictReader(f)
        ]
    return [r for r in rows if r["step"] <= last_step]


def is_fallback(row: dict[str, Any]) -> bool:
    return str(row["path"]).startswith("fallback")


def fallback_bytes(statistics: list[dict[str, Any]]) -> int:
    """Bytes of AllGather, ReduceScatter and AllReduce that another backend carried."""
    return sum(
        int(row["bytes"])
        for row in statistics
        if is_fallback(row)
        and row["collective"].lower().replace("_", "").startswith(SHARDED_COLLECTIVES)
    )


def print_table(console: Console, statistics: list[dict[str, Any]], rank: int) -> None:
    table = Table(title=f"Collectives of rank {rank}", title_justify="left")
    table.add_column("collective")
    table.add_column("path taken")
    for column in ("calls", "bytes", "time", "wait time"):
        table.add_column(column, justify="right")
    for row in sorted(statistics, key=lambda r: (is_fallback(r), r["collective"], r["path"])):
        table.add_row(
            str(row["collective"]),
            str(row["path"]),
            f"{row['calls']:,}",
            _bytes(row["bytes"]),
            # The fallback's operations are counted, not timed.
            "-" if is_fallback(row) else f"{row['seconds']:.2f} s",
            "-" if is_fallback(row) else f"{row['wait_seconds']:.2f} s",
            style="yellow" if is_fallback(row) else None,
        )
    console.print(table)


def plot(path: Path, rows: list[Row], entropy: float, title: str) -> str:
    """Draws the loss curve if matplotlib is there; the end of a sentence that says where it is."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no curve: matplotlib is missing (pip install 'deepspeed-smddp[plots]')"

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r["step"] for r in rows]
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes.plot(steps, [r["loss"] for r in rows], color="#4477aa", lw=1.2, label="training loss")
    held_out = [(r["step"], r["held_out"]) for r in rows if r["held_out"] is not None]
    if held_out:
        x, y = zip(*held_out, strict=True)
        axes.plot(x, y, "o", color="#ee6677", ms=5, label="held-out loss")
    axes.axhline(entropy, color="#555555", ls="--", lw=1, label=f"unigram entropy ({entropy:.2f})")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return f"curve in {path}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
