"""The tables and the figure of docs/dev/scale.md: simulations of 8 to 4,096 ranks, and real runs.

    python benchmarks/scale.py --out runs/scale                # simulate, write the page
    python benchmarks/scale.py --out runs/scale --real-runs    # after real runs (root)
    python benchmarks/scale.py --out runs/scale --tables-only  # from what is there
    python benchmarks/scale.py --out runs/scale --start-up-only  # counts the start-up again

The figures of a simulation are those of its second call. The real runs are those of
collectives.py between emulated hosts, and are simulated as well, on a network of their rate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calls.call_rows import Row
from calls.charts import size_text
from shared import csv_rows
from shared.chart import light_grid, plt, save
from shared.simulated import simulate, sizes_option

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dev" / "scale.md"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Layout:
    hosts: int
    ranks_per_host: int
    sizes: tuple[int, ...]
    view: str = "all"

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return layout_name(self.hosts, self.ranks_per_host, self.view)


def layout_name(hosts: int, ranks_per_host: int, view: str) -> str:
    return f"{hosts} x {ranks_per_host}" + (", a rail" if view == "rail" else "")


# Simulated ranks of a host copy all that they exchange there: large buffers take minutes.
SMALL = (64 * KIB, MIB, 16 * MIB)
LARGE = (*SMALL, 256 * MIB)
LAYOUTS = (
    Layout(8, 1, LARGE),
    Layout(64, 1, LARGE),
    Layout(512, 1, SMALL),
    Layout(8, 8, SMALL),
    Layout(64, 8, SMALL),
    Layout(512, 8, SMALL, "rail"),
)
NETWORK = ("--gbit", "100", "--latency-us", "20", "--message-us", "1")

# What two cores carry: more ranks, on slower links. Latency and time per message are those of the
# selector's default network model.
REAL = (
    (4, 1, "1gbit"),
    (8, 1, "100mbit"),
    (16, 2, "100mbit"),
    (16, 4, "100mbit"),
    (16, 8, "100mbit"),
)
REAL_SIZES = (64 * KIB, MIB, 4 * MIB)
GBIT = {"1gbit": 1.0, "100mbit": 0.1}


# --- what is run ---------------------------------------------------------------------------------


def simulate_all(layouts: Sequence[Layout]) -> Iterator[dict[str, Any]]:
    for layout in layouts:
        print(f"simulating {layout}", flush=True)
        options = (*NETWORK, *sizes_option(layout.sizes), "--view", layout.view)
        yield simulate(layout.hosts, layout.ranks_per_host, *options)


def count_start_ups(sweep: Sequence[dict[str, Any]]) -> None:
    """Put what the store serves in a start-up into the answers that are there already."""
    for answer in sweep:
        print(f"counting {layout_text(answer)}", flush=True)
        options = ("--view", answer["view"], "--start-up-only", "1")
        counted = simulate(answer["hosts"], answer["ranks_per_host"], *options)
        names = [name for name in counted if "store_" in name]
        names += ["rank_info_bytes", "further_groups"]
        answer.update({name: counted[name] for name in names})


def run_real(out: Path) -> None:
    for hosts, ranks_per_host, rate in REAL:
        csv = out / f"real-{hosts}x{ranks_per_host}.csv"
        print(f"running {hosts} x {ranks_per_host} at {rate}", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks/collectives.py"), "--peers", "none"]
        command += ["--from", "core", "--ops", "all_gather", "--turns", "2"]
        command += ["--hosts", str(hosts), "--ranks-per-host", str(ranks_per_host), "--rate", rate]
        command += ["--sizes", ",".join(f"{size // KIB}K" for size in REAL_SIZES)]
        subprocess.run([*command, "--csv", str(csv)], check=True)


def simulate_real(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each layout that was run, on links of its rate, over TCP: messages stay in order."""
    layouts = {(row.hosts, row.ranks_per_host, row.rate) for row in rows}
    return [
        simulate(
            hosts,
            per_host,
            *("--gbit", str(GBIT[rate]), "--latency-us", "20", "--message-us", "4"),
            *("--assume", "20,4,1.25", "--ordered", "1", *sizes_option(REAL_SIZES)),
        )
        for hosts, per_host, rate in sorted(layouts)
    ]


# --- the tables ----------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, *lines)]).replace(
        "\n", f"\n{rule}\n", 1
    )


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def layout_text(answer: dict[str, Any]) -> str:
    return layout_name(answer["hosts"], answer["ranks_per_host"], answer["view"])


def ranks_of(answer: dict[str, Any]) -> int:
    return int(answer["hosts"]) * int(answer["ranks_per_host"])


def start_up(answers: Sequence[dict[str, Any]]) -> str:
    lines = []
    for answer in answers:
        memory = answer["group_bytes_per_rank"]
        lines.append(
            [
                f"{ranks_of(answer):,}",
                layout_text(answer).removesuffix(", a rail"),
                f"{answer['rank_info_bytes']}",
                f"{answer['store_values']:,}",
                bytes_text(float(answer["store_bytes"])),
                f"{answer['most_store_values']:,}",
                f"{answer['store_keys_left']:,}",
                "" if answer["view"] == "rail" else bytes_text(memory),
            ]
        )
    head = ("ranks", "hosts x ranks", "bytes that a rank publishes", "values that the store serves")
    head += ("their bytes", "most values to one rank", "keys that stay")
    return table((*head, "memory of the group per rank"), lines)


def further_groups(answers: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            layout_text(answer).removesuffix(", a rail"),
            f"{group['ranks']:,}, on {group['hosts']} host" + "s" * (group["hosts"] > 1),
            f"{group['store_sets']:,}",
            f"{group['store_values']:,}",
            bytes_text(float(group["store_bytes"])),
            f"{group['most_store_values']:,}",
            f"{group['store_keys_left']:,}",
        ]
        for answer in answers
        for group in answer["further_groups"]
    ]
    head = ("hosts x ranks of the job", "ranks of the group", "values that are set")
    head += ("values that the store serves", "their bytes", "most values to one rank")
    return table((*head, "keys that stay"), lines)


def calls(answers: Sequence[dict[str, Any]]) -> str:
    lines = []
    for answer in answers:
        simulated = answer["hosts"] * (1 if answer["view"] == "rail" else answer["ranks_per_host"])
        for result in answer["results"]:
            seconds, bound = result["seconds"], result["bound_seconds"]
            lines.append(
                [
                    f"{ranks_of(answer):,}",
                    layout_text(answer),
                    size_text(result["bytes"]),
                    result["path"],
                    f"{seconds * 1e6:,.0f}",
                    f"{seconds / bound:.2f}",
                    f"{result['messages'] / simulated:,.0f}",
                    f"{result['writes'] / simulated:,.0f}",
                    f"{result['passes'] / simulated:,.0f}",
                ]
            )
    head = ("ranks", "hosts x ranks", "bytes", "path", "us", "times the bound")
    return table((*head, "messages of a rank", "writes", "passes"), lines)


def beside(rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> str:
    simulated = {
        (answer["hosts"], answer["ranks_per_host"], result["bytes"]): result["seconds"] * 1e6
        for answer in answers
        for result in answer["results"]
    }
    lines = []
    for row in rows:
        us = simulated[row.hosts, row.ranks_per_host, row.bytes]
        lines.append(
            [
                f"{row.hosts * row.ranks_per_host}",
                f"{row.hosts} x {row.ranks_per_host}",
                row.rate,
                size_text(row.bytes),
                f"{row.median_us:,.0f}",
                f"{us:,.0f}",
                f"{us / row.median_us - 1:+.0%}",
            ]
        )
    head = ("ranks", "hosts x ranks", "links", "bytes", "measured us", "simulated us")
    return table((*head, "simulated, compared with measured"), lines)


def with_parts(text: str, parts: dict[str, str]) -> str:
    """The page, with what stands between the marks of each part replaced."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{part}\n{end}{after}"
    return text


# --- the figure ----------------------------------------------------------------------------------


def draw(answers: Sequence[dict[str, Any]], path: Path) -> None:
    figure, (ratio, memory) = plt.subplots(1, 2, figsize=(9.5, 4.2), width_ratios=(2, 1))
    handles = []
    for answer, marker in zip(answers, "osD^vP", strict=False):
        per_host = answer["ranks_per_host"]
        colour = "#0072b2" if per_host == 1 else "#d55e00"
        (line,) = ratio.plot(
            [result["bytes"] / MIB for result in answer["results"]],
            [result["seconds"] / result["bound_seconds"] for result in answer["results"]],
            marker=marker,
            color=colour,
            alpha=0.85,
            label=layout_text(answer),
        )
        handles.append(line)
        if answer["view"] == "all":
            memory.plot(
                ranks_of(answer), answer["group_bytes_per_rank"] / KIB, marker=marker, color=colour
            )
    ratio.set(xscale="log", yscale="log", xlabel="output of the AllGather, MiB")
    ratio.set_ylabel("time / lower bound")
    ratio.set_yticks((1, 2, 5, 10), ("1", "2", "5", "10"), minor=False)
    ratio.set_yticks((), minor=True)
    memory.set(xscale="log", xlabel="ranks", ylabel="memory of a group, KiB per rank")
    memory.set_ylim(bottom=0)
    for axes in (ratio, memory):
        light_grid(axes)
    title = ("AllGather and memory, simulated", "100 Gbit/s per host, 20 us, 1 us per message")
    save(figure, path, title, handles)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the raw data")
    parser.add_argument("--real-runs", action="store_true", help="measure first (needs root)")
    parser.add_argument("--tables-only", action="store_true", help="simulate nothing")
    parser.add_argument("--start-up-only", action="store_true", help="simulate no collective")
    parser.add_argument("--page", choices=["-"], help="print the page and write no file")
    parser.add_argument("--most-ranks", type=int, default=4096, help="leave out larger layouts")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.real_runs:
        run_real(args.out)
    rows = [row for csv in sorted(args.out.glob("real-*.csv")) for row in csv_rows.read(Row, csv)]
    rows.sort(key=lambda row: (row.hosts * row.ranks_per_host, row.bytes))
    raw = args.out / "simulated.json"
    if args.start_up_only:
        data = json.loads(raw.read_text())
        count_start_ups(data["sweep"])
        raw.write_text(json.dumps(data, indent=1) + "\n")
    elif not args.tables_only:
        layouts = [layout for layout in LAYOUTS if layout.ranks <= args.most_ranks]
        data = {"sweep": list(simulate_all(layouts)), "real": simulate_real(rows)}
        count_start_ups(data["sweep"])
        raw.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(raw.read_text())
    parts = {"start-up": start_up(data["sweep"]), "calls": calls(data["sweep"])}
    parts["further groups"] = further_groups(data["sweep"])
    if rows:
        parts["real runs"] = beside(rows, data["real"])
    text = with_parts(PAGE.read_text(), parts)
    if args.page == "-":
        sys.stdout.write(text)
        return 0
    draw(data["sweep"], args.out / "scale.png")
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
