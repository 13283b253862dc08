"""The results of ``smddp bench`` as a page for a terminal of 80 columns, and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed_smddp.bench.bench_case import TITLES
from deepspeed_smddp.bench.bench_report import BenchReport, Result
from deepspeed_smddp.config.units import number_text, rate_text, size_text
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.report.wording import count

WIDTH = 80
NAMES = {"smddp": "smddp", "gloo": "Gloo", "nccl": "NCCL"}
_HOSTS = 4  # that are named


def show(report: BenchReport, console: Console) -> None:
    """Prints the tables, and what is wrong or missing."""
    width = min(WIDTH, console.width)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), width=width)

    say(_head(report))
    say(
        f"Data: {report.data}. Times: of a call on the slowest rank. algbw, busbw: GB/s as in "
        "nccl-tests."
        + (f" link: share of {rate_text(report.rate)} ({report.rate_origin})." * _linked(report))
    )
    for (op, dtype), group in groupby(report.results, lambda r: (r.case.op, r.case.dtype)):
        console.print()
        say(f"{TITLES[op]}, {dtype}", "bold")
        rows = list(group)
        console.print(_table(report, rows), width=width)
        for text in _coded(report, rows):
            say(text)
    console.print()
    for text in report.wrong:
        say(f"wrong   {text}", "red")
    if report.failure:
        say(f"failed  {report.failure}", "red")
    if report.stopped:
        say(f"Stopped by {report.stopped}.", "yellow")
    if report.measured < report.planned or report.stopped:
        say(f"PARTIAL: {report.measured} of {report.planned} cases.", "yellow")
    elif not report.wrong:
        say(f"All {len(report.results)} results are right in every turn.", "green")


def _linked(report: BenchReport) -> bool:
    return report.rate > 0 and len(report.hosts) > 1


def _head(report: BenchReport) -> str:
    hosts = [f"{host} ({len(ranks)})" for host, ranks in report.hosts.items()]
    more = ", ..." if len(hosts) > _HOSTS else ""
    return (
        f"{report.ranks} ranks on {count(len(hosts), 'host')}: {', '.join(hosts[:_HOSTS])}{more}; "
        f"{report.device} tensors, {' and '.join(NAMES[b] for b in report.backends)}"
        f"{' in turns' if len(report.backends) > 1 else ''}"
    )


def _table(report: BenchReport, results: Sequence[Result]) -> Table:
    columns = ["size", "over", "p50", "p90", "p99", "algbw", "busbw"]
    linked, compared = _linked(report), len(report.backends) > 1
    crossed = any(result.sent.raw for result in results)
    columns += ["link"] * linked + ["sent"] * crossed + ["faster"] * compared
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "over" else "right", no_wrap=True)
    for case, group in groupby(results, lambda r: r.case):
        rows = list(group)
        for number, result in enumerate(rows):
            cells = [size_text(case.size, 4) if number == 0 else "", NAMES[result.backend]]
            cells += [_time(result.percentile(share)) for share in (50, 90, 99)]
            cells += [_rate(rate) for rate in (result.algbw, result.busbw(report.ranks))]
            share = result.utilisation(report.ranks_of_hosts, report.rate)
            cells += ["" if share is None else f"{share:.0%}"] * linked
            ratio = result.sent.ratio
            cells += ["" if ratio is None else f"{ratio:.2f}"] * crossed
            first = number == 0 and len(rows) > 1
            cells += [f"{rows[1].median / result.median:.2f}x" if first else ""] * compared
            table.add_row(*cells, style="red" if result.wrong else "")
    return table


def _coded(report: BenchReport, results: Sequence[Result]) -> Iterator[str]:
    """A line for each run of sizes for which coding was chosen alike; the reason of the last."""
    whys = [(r.case.size, r.sent.why(report.coding)) for r in results if r.sent.raw]
    for _, group in groupby(whys, lambda one: re.sub(r"[0-9.]+", "", one[1])):
        rows = list(group)
        sizes = " to ".join(dict.fromkeys(size_text(size, 4) for size, _ in (rows[0], rows[-1])))
        yield f"{sizes}: {rows[-1][1]}"


def _rate(bytes_per_second: float) -> str:
    """GB/s."""
    rate = bytes_per_second / 1e9
    return f"{rate:.3f}" if rate < 10 else f"{rate:.1f}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{number_text(seconds / scale)} {unit}"
    return f"{number_text(seconds * 1e6)} us"


_COLOURS = {"smddp": "#c8401c", "gloo": "#444444", "nccl": "#1f6fb4"}
_COLUMNS = 3


def draw(report: BenchReport, path: Path) -> None:
    """Writes the picture: lines at the median, areas between p90 and the fastest call.

    Raises:
        CommandError: the file can't be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    kinds = list(dict.fromkeys((r.case.op, r.case.dtype) for r in report.results))
    rows = -(-len(kinds) // _COLUMNS)
    columns = min(_COLUMNS, len(kinds))
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows + 0.9))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(kinds) :]:
        axes.set_visible(False)
    for axes, (op, dtype) in zip(grid.flat, kinds, strict=False):
        for backend in report.backends:
            results = [
                r
                for r in report.results
                if (r.case.op, r.case.dtype, r.backend) == (op, dtype, backend)
            ]
            sizes = [r.case.size for r in results]
            bus = [r.case.bus_factor(report.ranks) * r.case.size / 1e9 for r in results]
            pairs = list(zip(bus, results, strict=True))
            low = [b / r.percentile(90) for b, r in pairs]
            high = [b / min(r.calls) for b, r in pairs]
            colour = _COLOURS[backend]
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            medians = [b / r.median for b, r in pairs]
            axes.plot(sizes, medians, color=colour, marker="o", markersize=4, label=NAMES[backend])
        axes.set_title(f"{TITLES[op]}, {dtype}", fontsize=9, loc="left")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=16))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(int(size))))
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(color="#eee")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("busbw, GB/s", fontsize=9)
    title = f"{report.ranks} ranks on {count(len(report.hosts), 'host')}, {report.device}"
    if report.measured < report.planned or report.stopped:
        title += ", partial"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    output_files.save_picture(figure, path, dpi=120)
