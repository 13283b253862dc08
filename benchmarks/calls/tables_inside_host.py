"""Markdown tables of runs inside one host: every competitor, the best peer, the bare copy."""

from __future__ import annotations

from collections.abc import Sequence

from .call_rows import Row
from .cases import COALESCED, Case
from .comparison import (
    FROM_TORCH,
    OURS,
    ByCase,
    best_peer,
    by_case,
    competitors,
    line,
    microseconds,
    ratio,
)


def tables(rows: Sequence[Row]) -> list[str]:
    """Lines for the rows of one setting.

    A case that was measured only for comparison with the coalesced operation is in the table of
    that operation alone.
    """
    cases = by_case(rows)
    coalesced = {case: found for case, found in cases.items() if case.op == COALESCED}
    single = {Case("all_gather", case.dtype, case.bytes) for case in coalesced}
    plain = {c: found for c, found in cases.items() if c not in coalesced and c not in single}
    lines = plain_table(plain) if plain else []
    if coalesced:
        lines += ["", *coalesced_table(coalesced, cases)]
    return lines


def plain_table(cases: ByCase) -> list[str]:
    names = competitors(row for found in cases.values() for row in found.values())
    torch = FROM_TORCH in names and "gloo" in names
    head = ["operation", "type", "bytes", *names]
    head += ["best peer", "smddp / best", "smddp / copy"]
    head += [f"{FROM_TORCH} / gloo"] if torch else []
    lines = [
        "Median microseconds; ratios of times, so smddp is faster if the ratio is below 1.",
        "",
        line(head),
        f"|---|---|{'---:|' * (len(head) - 2)}",
    ]
    for case, found in cases.items():
        ours, best = found.get(OURS), best_peer(found)
        cells = [case.op, case.dtype, f"{case.bytes:,}"]
        cells += [microseconds(found.get(name)) for name in names]
        cells += [best.competitor if best else "", ratio(ours, best)]
        cells += [ratio(ours, found.get("copy"))]
        cells += [ratio(found.get(FROM_TORCH), found.get("gloo"))] if torch else []
        lines.append(line(cells))
    return lines


def coalesced_table(coalesced: ByCase, cases: ByCase) -> list[str]:
    lines = [
        "| AllGather of | competitor | 64 tensors, us | one tensor, us | 64 / one |",
        "|---|---|---:|---:|---:|",
    ]
    for case, found in coalesced.items():
        single = cases.get(Case("all_gather", case.dtype, case.bytes), {})
        for name, row in found.items():
            one = single.get(name)
            cells = [f"{case.bytes:,} bytes {case.dtype}", name]
            lines.append(line([*cells, microseconds(row), microseconds(one), ratio(row, one)]))
    return lines
