"""Markdown tables of runs inside one host: every competitor, the best peer, the bare copy."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import COALESCED, Case
from .record import Row
from .report import OURS, best_peer, by_case, microseconds

FROM_TORCH = f"{OURS}-torch"


def ratio(one: Row | None, other: Row | None) -> str:
    return f"{one.median_us / other.median_us:.2f}" if one and other else ""


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Of one setting; a case that only the coalesced operation asked for stands in its table."""
    cases = by_case(rows)
    coalesced = {case: found for case, found in cases.items() if case.op == COALESCED}
    beside = {Case("all_gather", case.dtype, case.bytes) for case in coalesced}
    plain = {c: found for c, found in cases.items() if c not in coalesced and c not in beside}
    lines = table(plain) if plain else []
    if coalesced:
        lines += ["", *coalesced_table(coalesced, cases)]
    return lines


def table(cases: dict[Case, dict[str, Row]]) -> list[str]:
    names = list(dict.fromkeys(name for found in cases.values() for name in found))
    torch = FROM_TORCH in names and "gloo" in names
    head = ["operation", "type", "bytes", *names]
    head += ["best peer", "smddp / best", "smddp / copy"]
    head += [f"{FROM_TORCH} / gloo"] if torch else []
    lines = [
        "Median microseconds; ratios of times, so below 1 smddp is the faster.",
        "",
        f"| {' | '.join(head)} |",
        f"|---|---|{'---:|' * (len(head) - 2)}",
    ]
    for case, found in cases.items():
        ours, best = found.get(OURS), best_peer(found)
        cells = [case.op, case.dtype, f"{case.bytes:,}"]
        cells += [microseconds(found.get(name)) for name in names]
        cells += [best.competitor if best else "", ratio(ours, best)]
        cells += [ratio(ours, found.get("copy"))]
        cells += [ratio(found.get(FROM_TORCH), found.get("gloo"))] if torch else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def coalesced_table(
    coalesced: dict[Case, dict[str, Row]], cases: dict[Case, dict[str, Row]]
) -> list[str]:
    lines = [
        "| AllGather of | competitor | 64 tensors, us | one tensor, us | 64 / one |",
        "|---|---|---:|---:|---:|",
    ]
    for case, found in coalesced.items():
        whole = cases.get(Case("all_gather", case.dtype, case.bytes), {})
        for name, row in found.items():
            one = whole.get(name)
            cells = [f"{case.bytes:,} bytes {case.dtype}", name]
            cells += [microseconds(row), microseconds(one), ratio(row, one)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
