"""Rows as tables: for the terminal, and in Markdown against the best peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from .plan import OPS, Case
from .record import Row

OURS = "smddp"


def by_case(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    """Of one setting: case -> competitor -> row, by operation and size."""
    found: dict[Case, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (OPS.index(r.op), r.bytes)):
        found.setdefault(Case(row.op, row.dtype, row.bytes), {})[row.competitor] = row
    return found


def table(rows: Sequence[Row]) -> Table:
    """Per case, microseconds of every competitor, and our utilisation."""
    names = list(dict.fromkeys(row.competitor for row in rows))
    ours = [name for name in names if name.startswith(OURS)]
    out = Table("operation", "bytes", *(f"{n} us" for n in names), box=None, pad_edge=False)
    for name in ours:
        out.add_column(f"{name} util")
    out.add_column("drops")
    for column in out.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    out.columns[0].no_wrap = True
    for case, found in by_case(rows).items():
        cells = [f"{row.median_us:,.0f}" if (row := found.get(n)) else "" for n in names]
        cells += [f"{100 * row.utilisation:.0f} %" if (row := found.get(n)) else "" for n in ours]
        drops = sum(row.drops for row in found.values())
        out.add_row(case.op, f"{case.bytes:,}", *cells, f"{drops}")
    return out


def best_peer(found: dict[str, Row]) -> Row | None:
    peers = [row for name, row in found.items() if not name.startswith(OURS)]
    return min(peers, key=lambda row: row.median_us, default=None)


def size_at_90(rows: Iterable[Row]) -> str:
    """The least size from which on a competitor stays at 90 % of its own peak utilisation."""
    ordered = sorted(rows, key=lambda row: row.bytes)
    enough = 0.9 * max(row.utilisation for row in ordered)
    answer = ordered[-1].bytes
    for row in reversed(ordered):
        if row.utilisation < enough:
            break
        answer = row.bytes
    return f"{answer:,}"


def markdown(rows: Sequence[Row]) -> str:
    """One table per setting, ours against the best peer; then where each has 90 % of its peak."""
    lines: list[str] = []
    settings: dict[tuple[int, int, str, int], list[Row]] = {}
    for row in rows:
        key = (row.hosts, row.ranks_per_host, row.rate, row.nics)
        settings.setdefault(key, []).append(row)
    for (hosts, ranks, rate, nics), here in sorted(settings.items(), key=lambda item: item[0]):
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
                    f"{100 * ours.utilisation:.1f} %",
                    f"{100 * ours.of_ceiling:.1f} %",
                ]
            if peer:
                cells[5:8] = [
                    peer.competitor,
                    f"{peer.median_us:,.0f}",
                    f"{100 * peer.utilisation:.1f} %",
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
            peak = f"{100 * max(row.utilisation for row in mine):.1f} %" if mine else "-"
            cells += [peak, size_at_90(mine) if mine else "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
