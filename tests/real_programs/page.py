"""The page of results in ``docs/``, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .runs import CHECKPOINT, HOSTS, RANKS, REFERENCE, STEPS, TOLERANCE, Case, Run, difference

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def write(
    name: str, make: str, cases: Sequence[Case], runs: Sequence[Run], facts: Mapping[str, str]
) -> str:
    """The whole page."""
    parts = [f"# {name} over smddp: results", _facts(make, facts), _summary(cases, runs)]
    parts += [_not_run(cases, runs), *(_losses(case, runs) for case in cases)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(make: str, facts: Mapping[str, str]) -> str:
    lines = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return (
        f"`{make}` writes this page.\n\n| | |\n|---|---|\n{lines}\n\n"
        f"Every run has {RANKS} ranks, counted as {HOSTS} hosts, on CPUs, and {STEPS} steps; a "
        f"resumed one continues the smddp run from its checkpoint of step {CHECKPOINT}. The "
        "collectives are rank 0's calls on smddp's own paths, by the ledger; none of them went to "
        "the fallback. A run fails if a loss is further from Gloo's than "
        + " or ".join(f"{value:g} ({name})" for name, value in TOLERANCE.items())
        + ", relatively."
    )


def _groups(runs: Sequence[Run], case: Case) -> dict[str, dict[str, Run]]:
    found: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run.case == case.name:
            kind = run.backend + ", resumed" * run.resumed
            found.setdefault(run.deepspeed, {})[kind] = run
    return found


def _summary(cases: Sequence[Case], runs: Sequence[Run]) -> str:
    lines = [
        "| DeepSpeed | case | run | last loss | largest relative difference from Gloo | "
        "AllGather, ReduceScatter, AllReduce |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        for deepspeed, by_kind in _groups(runs, case).items():
            reference = by_kind[REFERENCE]
            for kind, run in by_kind.items():
                counts = ", ".join(str(run.calls(c)) for c in _COLLECTIVES) if run.ledger else "-"
                apart = "-" if run is reference else f"{difference(run, reference):.1e}"
                lines.append(
                    f"| {deepspeed} | {case.title} | {kind} | {run.losses[STEPS]:.6f} | {apart} | "
                    f"{counts} |"
                )
    return "\n".join(lines)


def _not_run(cases: Sequence[Case], runs: Sequence[Run]) -> str:
    done = {(run.case, run.deepspeed) for run in runs}
    left_out = [
        f"{case.title} with {deepspeed}"
        for deepspeed in dict.fromkeys(run.deepspeed for run in runs)
        for case in cases
        if (case.name, deepspeed) not in done
    ]
    return f"Not run: {'; '.join(left_out)}." if left_out else ""


def _losses(case: Case, runs: Sequence[Run]) -> str:
    columns = {
        f"{deepspeed}, {kind}": run
        for deepspeed, by_kind in _groups(runs, case).items()
        for kind, run in by_kind.items()
    }
    if not columns:
        return ""
    command = next(iter(columns.values())).command
    lines = [
        f"## {case.title}",
        f"The command of the first run is `{command}`.\n",
        "| step | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for step in range(1, STEPS + 1):
        cells = [f"{r.losses[step]:.6f}" if step in r.losses else "" for r in columns.values()]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
