"""What a run measured, for the terminal."""

from __future__ import annotations

import statistics

from rich.table import Table

from .crews import FREE
from .record import Setting

OURS = "smddp"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def ratio(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.2f}"


def table(found: Setting) -> Table:
    """Medians over the turns, one line per competitor; the last one is the bound."""
    heads = ["samples/s", "step ms", "/ bound", "lost ms", "in calls ms", "CPU ms", "TFLOPS/rank"]
    networked = found.rows[0].wire_bytes is not None
    heads += ["MB on the wire", "/ least"] if networked else []
    out = Table("", *heads, box=None, pad_edge=False)
    for column in out.columns[1:]:
        column.justify = "right"
    for name in found.names():
        step = found.median(name, "step_ms")
        wire = found.median(name, "wire_bytes")
        cells = [
            number(found.median(name, "samples_per_second"), 2),
            number(step),
            ratio(step, found.bound_ms),
            number(found.lost_ms(name)),
            number(found.waited_ms(name)),
            number(found.median(name, "cpu_ms")),
            number(found.median(name, "tflops_per_rank"), 4),
        ]
        if networked:
            cells += [number(None if wire is None else wire / 1e6)]
            cells += [ratio(wire, found.median(FREE, "least_wire_bytes"))]
        out.add_row(name, *cells)
    bound = found.bound_ms
    if bound is not None:
        out.add_row("bound", number(found.samples(bound), 2), number(bound), "1")
    return out


def lines(found: Setting) -> list[str]:
    """How the competitors compare, in sentences."""
    out = []
    if found.compute_ms is not None:
        text = f"the step with communication made free: {found.compute_ms:.1f} ms"
        if found.wire_ms is not None:
            text += f"; bytes / practical ceiling: {found.wire_ms:.1f} ms"
        out.append(text)
    if found.least_ms is not None and found.bound_ms:
        out.append(
            f"with what no bucket can cross beside (before the first is full, after the backward "
            f"pass): {found.least_ms:.1f} ms, {found.least_ms / found.bound_ms:.2f} times the bound"
        )
    for name in found.names():
        hidden, most = found.median(name, "hidden_share"), found.median(name, "hideable_bytes")
        if hidden is not None and most is not None:
            out.append(
                f"{name}: the backward pass computed for "
                f"{number(found.median(name, 'backward_ms'))} ms, behind which {most / 1e6:.1f} MB "
                f"can be hidden; {100 * hidden:.0f} % of that was; then it waited "
                f"{number(found.median(name, 'exposed_ms'))} ms"
            )
    for name in found.names():
        if name == OURS or not found.of(OURS):
            continue
        ratios = found.ratios("samples_per_second", OURS, name)
        if not ratios:
            continue
        ours, theirs = (found.median(n, "samples_per_second") for n in (OURS, name))
        out.append(
            f"samples/s of {OURS} / {name}: {ratio(ours, theirs)} "
            f"(turn by turn {min(ratios):.2f} to {max(ratios):.2f}, "
            f"median {statistics.median(ratios):.2f})"
        )
        lost, theirs = found.lost_ms(OURS), found.lost_ms(name)
        if lost is not None and theirs is not None and theirs > 0:
            out.append(
                f"time lost to communication: {OURS} {lost:.1f} ms, {name} {theirs:.1f} ms, "
                f"ratio {lost / theirs:.2f}"
            )
        difference = found.of(name)[-1].loss_difference
        if difference is not None:
            steps = sum(row.steps for row in found.of(name))
            out.append(
                f"losses of {OURS} and {name} agree: at most {100 * difference:.3f} % apart "
                f"in {steps} steps and those of the warm-up"
            )
    return out
