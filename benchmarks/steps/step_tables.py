"""The table and the sentences of a setting, for the terminal."""

from __future__ import annotations

import statistics

from rich.table import Table
from shared.build import OTHER

from .step_rows import Setting
from .trainers import FREE, OURS


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def ratio(part: float | None, whole: float | None, digits: int = 2) -> str:
    return "-" if part is None or not whole else f"{part / whole:.{digits}f}"


def table(found: Setting) -> Table:
    """Medians over the turns: one line per competitor, then the bound."""
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
    """Sentences that compare the competitors."""
    out = bound_lines(found)
    for name in found.names():
        out += hidden_lines(found, name)
    for name in found.names():
        if name != OURS and found.of(OURS):
            out += comparison_lines(found, name)
    return out


def bound_lines(found: Setting) -> list[str]:
    out = []
    if found.compute_ms is not None:
        text = f"the step if communication took no time: {found.compute_ms:.1f} ms"
        if found.wire_ms is not None:
            text += f"; bytes / practical ceiling: {found.wire_ms:.1f} ms"
        out.append(text)
    if found.least_ms is not None and found.bound_ms:
        out.append(
            "the transfer, and the time in which no bucket can cross (before the first is full, "
            f"after the backward pass): {found.least_ms:.1f} ms, "
            f"{found.least_ms / found.bound_ms:.2f} times the bound"
        )
    return out


def hidden_lines(found: Setting, name: str) -> list[str]:
    hidden, most = found.median(name, "hidden_share"), found.median(name, "hideable_bytes")
    if hidden is None or most is None:
        return []
    return [
        f"{name}: the backward pass computes for {number(found.median(name, 'backward_ms'))} ms, "
        f"which can hide {most / 1e6:.1f} MB; {100 * hidden:.0f} % of that was hidden; then it "
        f"waits {number(found.median(name, 'exposed_ms'))} ms"
    ]


def comparison_lines(found: Setting, name: str) -> list[str]:
    """smddp and the competitor ``name``."""
    ratios = found.ratios("samples_per_second", OURS, name)
    if not ratios:
        return []
    digits = 3 if name.endswith(OTHER) else 2  # builds differ by little
    ours, theirs = (found.median(n, "samples_per_second") for n in (OURS, name))
    out = [
        f"samples/s of {OURS} / {name}: {ratio(ours, theirs, digits)} "
        f"(turn by turn {min(ratios):.{digits}f} to {max(ratios):.{digits}f}, "
        f"median {statistics.median(ratios):.{digits}f})"
    ]
    if name.endswith(OTHER):
        out.append(spread_line(found, name))
    lost, theirs = found.lost_ms(OURS), found.lost_ms(name)
    if lost is not None and theirs is not None and theirs > 0:
        out.append(
            f"time lost to communication: {OURS} {lost:.1f} ms, {name} {theirs:.1f} ms, "
            f"ratio {lost / theirs:.2f}"
        )
    difference = found.of(name)[-1].loss_difference
    if difference is not None:
        steps = sum(row.steps for row in found.of(name))
        by = f"differ by at most {100 * difference:.3f} %" if difference else "are equal to the bit"
        out.append(f"losses of {OURS} and {name} {by} in {steps} steps and those of the warm-up")
    return out


def spread_line(found: Setting, name: str) -> str:
    """Whether all turns of this build are faster or slower than all turns of the other one."""
    ours, theirs = ([row.samples_per_second for row in found.of(n)] for n in (OURS, name))
    ranges = f"{min(ours):.2f} to {max(ours):.2f} samples/s, {min(theirs):.2f} to {max(theirs):.2f}"
    if max(ours) < min(theirs):
        return f"this build is slower than the other one beyond the spread of the turns: {ranges}"
    if min(ours) > max(theirs):
        return f"this build is faster than the other one beyond the spread of the turns: {ranges}"
    return f"the two builds are within the spread of the turns: {ranges}"
