"""The figures and tables of CSV files.

    python benchmarks/figure.py runs/*.csv --figure runs/hosts.png
    python benchmarks/figure.py runs/*.csv --table

Between hosts: utilisation over size, one column of panels per number of ranks per host. Inside one
host: time over size, as a multiple of the bare copy's, one column per type and number of ranks. One
row per operation. A file may hold several settings; of a measurement that was made twice, the later
file counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from hosts import chart_inside, chart_network, record
from hosts.plan import ALL_OPS
from hosts.record import Row
from hosts.report import markdown


def draw(rows: Sequence[Row], path: Path) -> None:
    """A figure for the runs between hosts, or, where there are none, inside one."""
    between = [row for row in rows if row.utilisation is not None]
    if between:
        chart_network.draw(between, path)
    else:
        chart_inside.draw(rows, path)


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
    parser.add_argument("--ops", default=",".join(ALL_OPS))
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
