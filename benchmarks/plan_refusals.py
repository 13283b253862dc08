"""The planner's memory beside published runs that ran, their peaks, and memory that ran out.

    python benchmarks/plan_refusals.py            # a table by publisher, and the refused ones
    python benchmarks/plan_refusals.py --rows     # every run and report

A run that ran is refused where the planner says "does not fit". Counted are the runs whose
micro-batch is published; for the others the planner would choose one that fits. Peaks: what torch
had reserved, without CUDA's context, of torchtitan's page that the rows' column "url" names.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from planning import fitting
from planning.published import Row

from deepspeed_smddp.commands.plan import shape_of
from deepspeed_smddp.planning import hardware, training_job
from deepspeed_smddp.planning.memory_use import MemoryUse, Verdict, memory_use
from deepspeed_smddp.planning.training_job import Job

REPORTS = Path(__file__).parent / "planning" / "published_out_of_memory.csv"
PEAKS = REPORTS.with_name("published_peaks.csv")


class Judged(NamedTuple):
    """A run or a report: from whom, what, and what the planner says."""

    source: str
    what: str
    job: Job
    use: MemoryUse

    @property
    def verdict(self) -> Verdict:
        """Whether the planner says that it fits."""
        return self.use.verdict(self.job.cluster.gpu.memory_bytes)

    def __str__(self) -> str:
        parts = sorted(self.use.parts.items(), key=lambda of: -of[1].low)[:3]
        most = ", ".join(f"{name} {part.low / 1e9:.1f} ({part.why})" for name, part in parts)
        size = f"{self.use.low / 1e9:.1f} to {self.use.high / 1e9:.1f} GB"
        of = f"{self.job.cluster.gpu.memory_bytes / 1e9:.1f} GB"
        return f"{self.what}: {self.verdict}, {size} of {of}; most: {most}"


def ran() -> list[Judged]:
    """The published runs whose micro-batch is stated."""
    return [_run(row, job) for row, job in fitting.covered()[0] if row.columns["micro_batch"]]


def _run(row: Row, job: Job) -> Judged:
    what = f"row {row.number}, {row.model} on {job.gpus} {job.cluster.gpu.name}, {row.scheme}"
    return Judged(row.source, what, job, memory_use(job))


def peaks() -> Iterator[tuple[str, float, float, float]]:
    """Runs with a published peak: what, the peak, and what the planner says, in GiB."""
    jobs = {row.number: (row, job) for row, job in fitting.covered()[0]}
    with PEAKS.open(encoding="utf-8", newline="") as lines:
        for columns in csv.DictReader(lines):
            run = _run(*jobs[int(columns["row"])])
            context = run.use.parts["context"]
            ends = (run.use.low - context.low, run.use.high - context.high)
            yield run.what, float(columns["gib"]), ends[0] / 2**30, ends[1] / 2**30


def ran_out() -> Iterator[Judged]:
    """The reports of memory that ran out."""
    with REPORTS.open(encoding="utf-8", newline="") as lines:
        for columns in csv.DictReader(lines):
            job = job_of_report(columns)
            what = f"{columns['model']} on {job.gpus} {columns['gpu']}, {columns['scheme']}"
            yield Judged(columns["address"], what, job, memory_use(job))


def job_of_report(columns: dict[str, str]) -> Job:
    """The job of one row of the file; an empty column is what the planner assumes."""
    shape = replace(shape_of(columns["model"]), sequence=int(columns["sequence"]))
    gpu = hardware.GPUS[columns["gpu"]]
    gpus = int(columns["gpus"])
    cluster = hardware.Cluster(name=gpu.name, gpu=gpu, gpus_per_host=min(gpus, 8), network_gbit=100)
    words = columns["scheme"].split()
    scheme = training_job.Scheme(
        stage={"FSDP": 3, "DDP": 0}.get(words[0], int(words[0][-1]) if "ZeRO" in words[0] else 0),
        tensor=next((int(w[2:]) for w in words if w.startswith("TP")), 1),
    )
    framework = {"FSDP": "fsdp", "DDP": "fsdp", "FSDP2": "fsdp2", "Megatron": "megatron"}
    return Job(
        shape,
        cluster,
        gpus,
        replace(scheme, stage=3) if words[0] == "FSDP2" else scheme,
        training_job.Software(
            library="nccl",
            framework=framework.get(words[0], "deepspeed"),
            precision=columns["precision"],
            flash=columns["flash"] == "yes",
            overlap_comm=True,
            no_sync=words[0] == "FSDP",
        ),
        micro_batch=int(columns["micro_batch"]),
        accumulation=int(columns["accumulation"]),
        recomputation=columns["recomputation"],
        lora_rank=int(columns["lora_rank"] or 0),
        base_bits=int(columns["base_bits"] or 16),
    )


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print every run and report")
    options = parser.parse_args()
    for title, judged in (
        ("Published runs that ran", ran()),
        ("Reports of memory that ran out", list(ran_out())),
    ):
        print(f"{title}: {len(judged)}")
        sources = Counter(of.source for of in judged)
        for source, number in sources.items():
            of = Counter(j.verdict for j in judged if j.source == source)
            print(f"  {number:3}  " + ", ".join(f"{n} {v}" for v, n in of.items()) + f"  {source}")
        verdicts = Counter(of.verdict for of in judged)
        print("  together: " + ", ".join(f"{n} {v}" for v, n in verdicts.most_common()))
        print()
        for of_all in judged:
            if options.rows or of_all.verdict == "does not fit":
                print(f"  {of_all}")
        print()
    print("Published peaks, GiB")
    for what, peak, low, high in peaks():
        beyond = "" if peak <= high else f", {peak / high - 1:.0%} above the range"
        print(f"  {peak:5.1f}  planned {low:.1f} to {high:.1f}{beyond}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
