"""The planner's overlap and network constants against steps that were measured on emulated hosts.

    python benchmarks/planner_emulated.py     # docs/dev/planner-emulated.md

Reads the rows of training steps below benchmarks/results/; measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from deepspeed_smddp.planning.collective_time import simulated
from deepspeed_smddp.planning.constants import values

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The folders of the runs on the page: another run joins it when it is added here.
RUNS = (
    "2026-11-22-ddp-fsdp2",
    "2026-11-22-zero3",
    "2026-11-22-zero3-background-driving",
    "2026-11-22-zero3-two-libfabrics",
    "2026-11-23-rooms",
    "2026-11-25-zero3-rates",
)
PAGE = ROOT / "docs" / "dev" / "planner-emulated.md"


@dataclass(frozen=True)
class Step:
    """The medians of one run: seconds with smddp, without communication, and what is predicted."""

    run: str
    scheme: str
    workload: str
    layout: str
    rate: str
    measured: float
    busy: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted against measured, signed; 0.1 is a prediction that is 10% too long."""
        return self.predicted / self.measured - 1

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """What runs of the same kind have in common."""
        return self.scheme, self.workload, self.layout, self.rate


@dataclass(frozen=True)
class Traffic:
    """Communication of a step: ``nbytes`` out of each host at least, in so many collectives."""

    nbytes: float
    collectives: int
    hosts: int
    ranks_per_host: int

    def seconds(self, rate: float) -> float:
        """By the simulated AllGather, over links that carry ``rate`` bytes per second."""
        parts = self.collectives * (self.hosts - 1) * self.ranks_per_host
        rail = rate / self.ranks_per_host
        one = simulated("all_gather", self.hosts, self.nbytes / parts, rail)
        return self.collectives * one.seconds


def predicted(busy: float, traffic: Traffic, ceiling: float, scheme: str) -> float:
    """Seconds of a step, as ``step_time`` has it: computing, and communication less what overlaps.

    Args:
        busy: seconds of the step with ranks that do not communicate.
        ceiling: bytes per second that TCP sockets reached on a host's link.
        scheme: "ZeRO-3" has the overlap of DeepSpeed, others that of FSDP.
    """
    c = values()
    wire = traffic.seconds(ceiling * c["smddp.network"])
    share = c["overlap.deepspeed" if scheme == "ZeRO-3" else "overlap.share"]
    return busy + wire - share * min(busy, wire)


def steps() -> list[Step]:
    """One for each run between hosts that has smddp's rows, and those of silent ranks."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for path in sorted(path for run in RUNS for path in (RESULTS / run).glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("step_ms") and row.get("ceiling") and row.get("least_wire_bytes"):
                    layout = f"{row['hosts']} x {row['ranks_per_host']}"
                    name = path.relative_to(RESULTS).with_suffix("").as_posix()
                    key = (name, row["scheme"], row["workload"], layout, row["rate"])
                    runs[key].append(row)
    found = []
    for key, rows in runs.items():
        ours = [row for row in rows if row["competitor"].partition(":")[0] == "smddp"]
        ours = [row for row in ours if row["competitor"] == ours[0]["competitor"]]
        silent = [row for row in rows if row["competitor"] == "fake"]
        if ours and silent:
            busy = _median(silent, "step_ms") / 1e3
            traffic = Traffic(
                _median(ours, "least_wire_bytes"),
                # Of each layer: gathered in both passes, reduced once.
                3 * int(ours[0]["layers"]),
                int(ours[0]["hosts"]),
                int(ours[0]["ranks_per_host"]),
            )
            expected = predicted(busy, traffic, _median(ours, "ceiling"), key[1])
            found.append(Step(*key, _median(ours, "step_ms") / 1e3, busy, expected))
    return found


def median_error(found: list[Step]) -> float:
    """The median of the unsigned errors, where runs of one kind count as one, by their median."""
    kinds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for step in found:
        kinds[step.kind].append(abs(step.error))
    return statistics.median(statistics.median(errors) for errors in kinds.values())


def _median(rows: list[dict[str, str]], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)


def page(found: list[Step]) -> str:
    """The page in Markdown."""
    kinds, rates = {step.kind for step in found}, {step.rate for step in found}
    worst = max(found, key=lambda step: abs(step.error))
    within = sum(abs(step.error) <= 0.2 for step in found)
    head = f"""# The planner against steps on emulated hosts

Written by `python benchmarks/planner_emulated.py` from the rows in `benchmarks/results/`.

The planner has no model of a CPU. So computing is the measured step of ranks that do not
communicate, and the rate of the links is what TCP sockets reached in the same run. The rest is the
planner's: the share of the network that carries data, the simulated AllGather on links of that rate
in place of every collective (three of each layer), and the share of communication that overlaps,
with the constants that were fitted to [published speeds of GPUs](planner-validation.md). None was
fitted to these rows.

{len(found)} runs of {len(kinds)} kinds (scheme, model, layout). The median error is
{median_error(found):.1%} where runs of one kind count as one; {within} of {len(found)} runs are
within 20%; the largest error is {worst.error:+.1%}. ZeRO-3 on 2 x 1 is predicted too slow in every
run of the model "communication": more overlaps there than the constant for DeepSpeed says, which is
close to its lower bound.

Links of these rates were measured: {", ".join(sorted(rates))}.

| run | scheme | model | hosts x ranks | computing, ms | measured, ms | predicted, ms | error |
|---|---|---|---|---|---|---|---|
"""
    return head + "".join(
        f"| {s.run} | {s.scheme} | {s.workload} | {s.layout} | {s.busy * 1e3:.0f} "
        f"| {s.measured * 1e3:.0f} | {s.predicted * 1e3:.0f} | {s.error:+.1%} |\n"
        for s in found
    )


def main() -> int:
    """Writes the page; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="the file of the page")
    options = parser.parse_args()
    found = steps()
    options.out.write_text(page(found), encoding="utf-8")
    print(f"{len(found)} runs, median error {median_error(found):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
