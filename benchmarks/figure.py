"""The figure of utilisation over size, and a table against the best peer, from CSV files.

    python benchmarks/figure.py runs/*.csv --figure runs/hosts.png
    python benchmarks/figure.py runs/*.csv --table

One column of panels per number of ranks per host, one row per operation. A file may hold several
settings; of a measurement that was made twice, the later file counts.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from hosts import record
from hosts.plan import OPS
from hosts.record import Row
from hosts.report import markdown
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# A colour and a marker belong to a competitor, whichever others are drawn (Okabe and Ito's colours,
# which the colour-blind tell apart). Ours are the thick ones.
STYLES = {
    "smddp": ("#d55e00", "o", "smddp"),
    "smddp-torch": ("#e69f00", "D", "smddp, from torch"),
    "gloo": ("#000000", "x", "Gloo"),
    "mpich": ("#0072b2", "s", "MPICH, libfabric"),
    "mpich-ucx": ("#56b4e9", "v", "MPICH, UCX"),
    "impi": ("#009e73", "^", "Intel MPI"),
    "openmpi": ("#cc79a7", "P", "Open MPI"),
    "oneccl": ("#8c8c8c", "*", "oneCCL"),
}
TITLES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
SUBJECT = {
    "all_gather": "AllGather output",
    "reduce_scatter": "ReduceScatter input",
    "all_reduce": "AllReduce buffer",
}


def size_text(size: float, _: object = None) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size:g} B"


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Utilisation over size: a line per competitor, the practical ceiling dashed."""
    for name in STYLES:
        points = sorted((r.bytes, 100 * r.utilisation) for r in rows if r.competitor == name)
        if not points:
            continue
        colour, marker, _ = STYLES[name]
        ours = name.startswith("smddp")
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=5 if ours else 4.5,
            linewidth=2.4 if ours else 1.3,
            zorder=3 if ours else 2,
        )
    ceilings = [100 * r.utilisation / r.of_ceiling for r in rows if r.of_ceiling > 0]
    if ceilings:
        axes.axhline(statistics.median(ceilings), color="0.35", linestyle=(0, (5, 3)), linewidth=1)
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    # Powers of 16, labelled; the sizes that were measured are the markers.
    first, last = sizes[0], sizes[-1]
    ticks = [1 << e for e in range(8, 41, 4) if first / 2 <= 1 << e <= last * 2]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size_text))
    axes.set_yticks(range(0, 101, 20))
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_handles(rows: Sequence[Row]) -> list[Line2D]:
    names = [name for name in STYLES if any(row.competitor == name for row in rows)]
    handles = []
    for name in names:
        colour, marker, label = STYLES[name]
        width = 2.4 if name.startswith("smddp") else 1.3
        handles.append(
            Line2D([], [], color=colour, marker=marker, linewidth=width, markersize=5, label=label)
        )
    dashed = Line2D([], [], color="0.35", linestyle=(0, (5, 3)), linewidth=1)
    dashed.set_label("practical ceiling: bulk TCP both ways")
    return [*handles, dashed]


def rate(row: Row) -> str:
    """`1gbit` -> `1 Gbit/s`."""
    return re.sub(r"^([0-9.]+)([kmg]?)bit$", lambda m: f"{m[1]} {m[2].upper()}bit/s", row.rate)


def setting(rows: Sequence[Row]) -> str:
    def each(values: set[str]) -> str:
        return " and ".join(sorted(values))

    hosts = each({str(row.hosts) for row in rows})
    nics = each({f"{row.nics} x {rate(row)}" if row.nics > 1 else rate(row) for row in rows})
    return f"{hosts} emulated hosts, {nics} each way per host; {each({r.machine for r in rows})}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """One column per number of ranks per host, one row per operation that there is."""
    ops = [op for op in OPS if any(row.op == op for row in rows)]
    widths = sorted({row.ranks_per_host for row in rows})
    top = max(105.0, 105 * max(row.utilisation for row in rows))
    width = max(6.4, 0.8 + 3.3 * len(widths))
    per_line = max(2, int((width - 1.2) / 1.55))  # the last entry is the longest
    handles = legend_handles(rows)
    legend_lines = -(-len(handles) // per_line)
    height = 0.95 + 0.24 * legend_lines + 2.75 * len(ops)
    figure, grid = plt.subplots(
        len(ops), len(widths), figsize=(width, height), sharey=True, squeeze=False
    )
    for axes_row, op in zip(grid, ops, strict=True):
        for axes, ranks in zip(axes_row, widths, strict=True):
            found = [r for r in rows if r.op == op and r.ranks_per_host == ranks]
            if not found:
                axes.set_visible(False)
                continue
            panel(axes, found)
            axes.set_ylim(0, top)
            plural = "" if ranks == 1 else "s"
            rates = {rate(row) for row in found}
            title = f"{TITLES[op]}, {ranks} rank{plural} per host"
            if len(rates) == 1 and len({rate(row) for row in rows}) > 1:
                title += f", {rates.pop()}"
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xlabel(f"{SUBJECT[op]}", fontsize=9)
            axes.tick_params(labelsize=8)
        axes_row[0].set_ylabel("utilisation of the interface, %", fontsize=9)
    for text, inches, weight in (
        ("What collectives get out of the network", 0.12, "bold"),
        (setting(rows), 0.36, "normal"),
    ):
        y = 1 - inches / height
        figure.text(0.01, y, text, ha="left", va="top", fontsize=11, fontweight=weight)
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=per_line,
        frameon=False,
        fontsize=9,
    )
    bottom = (0.12 + 0.24 * legend_lines) / height
    figure.tight_layout(rect=(0, bottom, 1, 1 - 0.62 / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def latest(paths: Sequence[Path]) -> list[Row]:
    rows = {row.key(): row for path in paths for row in record.read(path)}
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, help="where the PNG (or PDF, SVG) goes")
    parser.add_argument("--table", action="store_true", help="print the comparison as Markdown")
    parser.add_argument("--ops", default=",".join(OPS))
    args = parser.parse_args()
    rows = [row for row in latest(args.csv) if row.op in args.ops.split(",")]
    if not rows:
        parser.error("these files hold no row of these operations")
    if args.figure:
        draw(rows, args.figure)
        print(f"wrote {args.figure}")
    if args.table or not args.figure:
        print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
