"""Markdown tables of runs between hosts: smddp beside the best peer, and each one's peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .call_rows import Row
from .cases import ALL_OPS
from .comparison import FROM_TORCH, OURS, best_peer, by_case, competitors, line, percent


def tables(rows: Sequence[Row]) -> list[str]:
    """Lines for the rows of one setting."""
    return [*comparison_table(rows), "", *peak_table(rows)]


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
