"""The figure and the tables of CSV files that collectives.py wrote.

    python benchmarks/figure.py runs/*.csv --figure runs/hosts.png
    python benchmarks/figure.py runs/*.csv --table

Between hosts: utilisation over size, with a column of panels for each number of hosts and of
ranks per host.
Inside one host: time over size, as a multiple of the time of the bare copy, with a column for each
type and number of ranks. Each operation has a row of panels. A file may hold several settings. If a
case was measured twice, the later file counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from calls.call_rows import Row
from calls.cases import ALL_OPS
from calls.tables import markdown
from shared import csv_rows
from shared.command_line import figure_path


def latest(paths: Sequence[Path]) -> list[Row]:
    rows = {row.key(): row for path in paths for row in csv_rows.read(Row, path)}
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", nargs="+", type=Path)
    parser.add_argument("--figure", type=figure_path, help="file for the figure: PNG, PDF or SVG")
    parser.add_argument("--table", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--ops", default=",".join(ALL_OPS), help="operations; default: all")
    args = parser.parse_args()
    rows = [row for row in latest(args.csv) if row.op in args.ops.split(",")]
    if not rows:
        parser.error("these files hold no row of these operations")
    if args.figure:
        from calls.charts import draw

        draw(rows, args.figure)
        print(f"wrote {args.figure}")
    if args.table or not args.figure:
        print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
