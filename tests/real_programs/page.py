"""The page of results in ``docs/``, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.jobs import table

from .runs import CHECKPOINT, HOSTS, RANKS, REFERENCE, STEPS, TOLERANCE, Case, Run, difference


def write(
    name: str, make: str, cases: Sequence[Case], runs: Sequence[Run], facts: Mapping[str, str]
) -> str:
    """The whole page."""
    tolerances = " or ".join(f"{value:g} ({name})" for name, value in TOLERANCE.items())
    made = {case: [run for run in runs if run.case == case.name] for case in cases}
    parts = [f"# {name} over smddp: results", f"`{make}` writes this page."]
    parts += [
        table(("", ""), facts.items()),
        f"Every run has {RANKS} ranks, counted as {HOSTS} hosts, on CPUs, and {STEPS} steps; a "
        f"resumed one continues the smddp run from its checkpoint of step {CHECKPOINT}. The "
        "collectives are rank 0's calls on smddp's own paths, by the ledger; none of them went to "
        f"the fallback. A run fails if a loss is further from Gloo's than {tolerances}, "
        "relatively.",
        _summary(made),
        _not_run(made),
        *(_losses(case, found) for case, found in made.items() if found),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _summary(made: Mapping[Case, Sequence[Run]]) -> str:
    rows = []
    for case, runs in made.items():
        references = {run.deepspeed: run for run in runs if run.backend == REFERENCE}
        for run in runs:
            counts = [run.calls(name) for name in ("all_gather", "reduce_scatter", "all_reduce")]
            reference = references[run.deepspeed]
            apart = "-" if run is reference else f"{difference(run, reference):.1e}"
            told = ", ".join(map(str, counts)) if run.ledger else "-"
            last = f"{run.losses[STEPS]:.6f}"
            rows.append([run.deepspeed, case.title, run.kind, last, apart, told])
    head = ["DeepSpeed", "case", "run", "last loss", "largest relative difference from Gloo"]
    return table([*head, "AllGather, ReduceScatter, AllReduce"], rows)


def _not_run(made: Mapping[Case, Sequence[Run]]) -> str:
    versions = dict.fromkeys(run.deepspeed for runs in made.values() for run in runs)
    left_out = [
        f"{case.title} with {deepspeed}"
        for deepspeed in versions
        for case, runs in made.items()
        if deepspeed not in {run.deepspeed for run in runs}
    ]
    return f"Not run: {'; '.join(left_out)}." if left_out else ""


def _losses(case: Case, runs: Sequence[Run]) -> str:
    rows = [
        [step, *(f"{run.losses[step]:.6f}" if step in run.losses else "" for run in runs)]
        for step in range(1, STEPS + 1)
    ]
    return f"## {case.title}\n\nThe command of the first run is `{runs[0].command}`.\n\n" + table(
        ["step", *(f"{run.deepspeed}, {run.kind}" for run in runs)], rows
    )
