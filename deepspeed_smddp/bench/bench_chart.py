"""The bus bandwidth over the size as a picture, a panel for each operation and type."""

from __future__ import annotations

from pathlib import Path

from deepspeed_smddp.bench.bench_case import TITLES, BenchError
from deepspeed_smddp.bench.bench_page import NAMES
from deepspeed_smddp.bench.bench_report import BenchReport
from deepspeed_smddp.diagnostics import pictures

_COLOURS = {"smddp": "#c8401c", "gloo": "#444444", "nccl": "#1f6fb4"}
_COLUMNS = 3


def check_available() -> None:
    """Raises BenchError if matplotlib is missing."""
    pictures.check_available(BenchError, "the figure")


def draw(report: BenchReport, path: Path) -> None:
    """Writes the picture: lines at the median, areas between p90 and the fastest call.

    Raises:
        BenchError: matplotlib is missing, or the file can't be written.
    """
    check_available()
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
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(color="#eee")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("busbw, GB/s", fontsize=9)
    hosts = len(report.hosts)
    title = f"{report.ranks} ranks on {hosts} host{'' if hosts == 1 else 's'}, {report.device}"
    if report.measured < report.planned or report.stopped:
        title += ", partial"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    pictures.save(figure, path, BenchError, dpi=120)


def _tick(size: float, _: object) -> str:
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g}{unit}"
    return f"{size:g}"
