"""Rows of calls as tables: one for the terminal, and those in Markdown.

Between hosts: smddp beside the best peer, and each one's peak. Inside one host: every competitor,
the best peer, the bare copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from . import tables_of_builds
from .call_rows import Row
from .cases import ALL_OPS, COALESCED, Case
from .comparison import (
    FROM_TORCH,
    OURS,
    ByCase,
    best_peer,
    by_case,
    competitors,
    line,
    microseconds,
    percent,
    ratio,
)


def terminal_table(rows: Sequence[Row]) -> Table:
    """Per case the microseconds of all competitors; with links, also the utilisation of smddp."""
    names = competitors(rows)
    networked = any(row.utilisation is not None for row in rows)
    ours = [name for name in names if name.startswith(OURS) and networked]
    out = Table("operation", "type", "bytes", *(f"{n} us" for n in names), box=None, pad_edge=False)
    for name in ours:
        out.add_column(f"{name} util")
    if networked:
        out.add_column("drops")
    for column in out.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    out.columns[0].no_wrap = True
    for case, found in by_case(rows).items():
        cells = [microseconds(found.get(n)) for n in names]
        cells += [percent(row.utilisation, 0) if (row := found.get(n)) else "" for n in ours]
        if networked:
            cells.append(f"{sum(row.drops or 0 for row in found.values())}")
        out.add_row(case.op, case.dtype, f"{case.bytes:,}", *cells)
    return out


def markdown(rows: Sequence[Row]) -> str:
    """The tables of each setting."""
    settings: dict[tuple[int, int, str, int | None], list[Row]] = {}
    for row in rows:
        key = (row.hosts, row.ranks_per_host, row.rate, row.nics)
        settings.setdefault(key, []).append(row)
    lines: list[str] = []
    for (hosts, ranks, rate, nics), here in sorted(settings.items(), key=lambda item: item[0]):
        if rate:
            title = f"{hosts} hosts x {ranks} ranks, {nics} x {rate}"
            found = [*comparison_table(here), "", *peak_table(here)]
        else:
            by_name = f"{hosts} x {ranks} ranks by name"
            title = f"{ranks} ranks on one host" if hosts == 1 else by_name
            found = tables_inside_host(here)
        lines += [f"### {title}", "", *found, ""]
        if builds := tables_of_builds.markdown(here):
            lines += [*builds, ""]
    return "\n".join(lines)


def comparison_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| operation | bytes | smddp us | utilisation | of ceiling | best peer | us "
        "| utilisation | peer / smddp |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in by_case(rows).items():
        ours, peer = found.get(OURS) or found.get(FROM_TORCH), best_peer(found)
        cells = [case.op, f"{case.bytes:,}", *["-"] * 7]
        if ours:
            cells[2] = f"{ours.median_us:,.0f}"
            cells[3:5] = [percent(ours.utilisation), percent(ours.of_ceiling)]
        if peer:
            cells[5:7] = [peer.competitor, f"{peer.median_us:,.0f}"]
            cells[7] = percent(peer.utilisation)
        if ours and peer:
            cells[8] = f"{peer.median_us / ours.median_us:.2f}"
        lines.append(line(cells))
    return lines


def size_at_90(rows: Iterable[Row]) -> str:
    """The least size from which on a competitor keeps 90 % of its own peak utilisation."""
    ordered = sorted(rows, key=lambda row: row.bytes)
    enough = 0.9 * max(row.utilisation or 0 for row in ordered)
    answer = ordered[-1].bytes
    for row in reversed(ordered):
        if (row.utilisation or 0) < enough:
            break
        answer = row.bytes
    return f"{answer:,}"


def peak_table(rows: Sequence[Row]) -> list[str]:
    """Each competitor's peak, and the size from which on it keeps 90 % of it."""
    ops = [op for op in ALL_OPS if any(row.op == op for row in rows)]
    lines = [
        "Peak utilisation, and the bytes from which on 90 % of it is reached:",
        "",
        line(["competitor", *(f"{op} | from" for op in ops)]),
        f"|---|{'---|---|' * len(ops)}",
    ]
    for name in competitors(rows):
        cells = [name]
        for op in ops:
            own = [row for row in rows if row.competitor == name and row.op == op]
            peak = percent(max((row.utilisation or 0 for row in own), default=None))
            cells += [peak, size_at_90(own) if own else "-"]
        lines.append(line(cells))
    return lines


def tables_inside_host(rows: Sequence[Row]) -> list[str]:
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
