"""Rows as tables: for the terminal, and in Markdown against the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from .plan import ALL_OPS, OPS, Case
from .record import Row

OURS = "smddp"
YARDSTICKS = ("copy", "fake")  # no libraries that anybody could use


def by_case(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    """Of one setting: case -> competitor -> row, by operation and size."""
    found: dict[Case, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (ALL_OPS.index(r.op), r.dtype, r.bytes)):
        found.setdefault(Case(row.op, row.dtype, row.bytes), {})[row.competitor] = row
    return found


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.median_us:,.0f}" if row.median_us >= 100 else f"{row.median_us:.3g}"


def percent(part: float | None, digits: int = 1) -> str:
    return "-" if part is None else f"{100 * part:.{digits}f} %"


def table(rows: Sequence[Row]) -> Table:
    """Per case, microseconds of every competitor; where there are links, our utilisation."""
    names = list(dict.fromkeys(row.competitor for row in rows))
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


def best_peer(found: dict[str, Row]) -> Row | None:
    peers = [row for name, row in found.items() if not name.startswith((OURS, *YARDSTICKS))]
    return min(peers, key=lambda row: row.median_us, default=None)


def size_at_90(rows: Iterable[Row]) -> str:
    """The least size from which on a competitor stays at 90 % of its own peak utilisation."""
    ordered = sorted(rows, key=lambda row: row.bytes)
    enough = 0.9 * max(row.utilisation or 0 for row in ordered)
    answer = ordered[-1].bytes
    for row in reversed(ordered):
        if (row.utilisation or 0) < enough:
            break
        answer = row.bytes
    return f"{answer:,}"


def markdown(rows: Sequence[Row]) -> str:
    """One table per setting, ours against the best peer; then where each has 90 % of its peak.

    Inside one host there is no utilisation, but the bare copy to compare with.
    """
    from .inside import lines_of  # which builds on this module

    lines: list[str] = []
    settings: dict[tuple[int, int, str, int | None], list[Row]] = {}
    for row in rows:
        key = (row.hosts, row.ranks_per_host, row.rate, row.nics)
        settings.setdefault(key, []).append(row)
    for (hosts, ranks, rate, nics), here in sorted(settings.items(), key=lambda item: item[0]):
        if not rate:
            title = (
                f"{ranks} ranks on one host" if hosts == 1 else f"{hosts} x {ranks} ranks by name"
            )
            lines += [f"### {title}", "", *lines_of(here), ""]
            continue
        lines += [f"### {hosts} hosts x {ranks} ranks, {nics} x {rate}", ""]
        lines += [
            "| operation | bytes | smddp us | utilisation | of ceiling | best peer | us "
            "| utilisation | peer / smddp |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for case, found in by_case(here).items():
            ours, peer = found.get(OURS) or found.get(f"{OURS}-torch"), best_peer(found)
            cells = [case.op, f"{case.bytes:,}", *["-"] * 7]
            if ours:
                cells[2:5] = [
                    f"{ours.median_us:,.0f}",
                    percent(ours.utilisation),
                    percent(ours.of_ceiling),
                ]
            if peer:
                cells[5:8] = [
                    peer.competitor,
                    f"{peer.median_us:,.0f}",
                    percent(peer.utilisation),
                ]
            if ours and peer:
                cells[8] = f"{peer.median_us / ours.median_us:.2f}"
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *peaks(here), ""]
    return "\n".join(lines)


def peaks(rows: Sequence[Row]) -> list[str]:
    """Of one setting: every competitor's peak and the size from which it has 90 % of it."""
    names = list(dict.fromkeys(row.competitor for row in rows))
    ops = [op for op in OPS if any(row.op == op for row in rows)]
    lines = [
        "Peak utilisation, and the bytes from which on 90 % of it is reached:",
        "",
        f"| competitor | {' | '.join(f'{op} | from' for op in ops)} |",
        f"|---|{'---|---|' * len(ops)}",
    ]
    for name in names:
        cells = []
        for op in ops:
            mine = [row for row in rows if row.competitor == name and row.op == op]
            peak = percent(max((row.utilisation or 0 for row in mine), default=None))
            cells += [peak, size_at_90(mine) if mine else "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
