#!/usr/bin/env python3
"""Draw the pictures of docs/dev/algorithms.md: which host has which shards after each step.

The schedules are those of csrc/topology/pattern.cc; each is carried out here, so that a picture
whose last row is not complete can't be drawn.

tools/draw_algorithms.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "smddp"  # the same picture gives the same file

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs" / "dev"
COLOURS = ("#2f6db5", "#2f7d45", "#b07a1a", "#8a3f8f", "#b5422f", "#3b8a8a", "#6b6b2f", "#555e6e")
CELL, WIDTH, PITCH = 0.34, 0.3, 1.5  # of a shard, in units of the axes; from one row to the next


class Message(NamedTuple):
    """One message of a step: from a column to a column, with the shards (or blocks) it carries."""

    source: int
    target: int
    shards: tuple[int, ...]


Step = list[Message]


def direct(hosts: int) -> list[Step]:
    """All-to-all: in step s, host h sends its own shard to host h + s."""
    return [[Message(h, (h + s) % hosts, (h,)) for h in range(hosts)] for s in range(1, hosts)]


def log(hosts: int) -> list[Step]:
    """Bruck's: step i sends a host's shards, up to 2**i of them, to the host 2**i below."""
    steps: list[Step] = []
    distance = 1
    while distance < hosts:
        count = min(distance, hosts - distance)
        steps.append(
            [
                Message(h, (h - distance) % hosts, tuple((h + k) % hosts for k in range(count)))
                for h in range(hosts)
            ]
        )
        distance *= 2
    return steps


def gathered(
    steps: list[Step], columns: int, shards: int, own: Callable[[int], Iterable[int]]
) -> list[list[set[int]]]:
    """The shards of each column before the first step and after each step."""
    states = [[set(own(c)) for c in range(columns)]]
    for step in steps:
        state = [set(has) for has in states[-1]]
        for message in step:
            missing = set(message.shards) - states[-1][message.source]
            if missing:
                raise ValueError(f"column {message.source} sends {missing} before it has them")
            state[message.target] |= set(message.shards)
        states.append(state)
    if any(len(has) != shards for has in states[-1]):
        raise ValueError(f"the last step leaves {states[-1]}")
    return states


def summed(steps: list[Step], columns: int) -> list[list[list[int]]]:
    """ReduceScatter: how many contributions each block of each column holds, after each step."""
    states = [[[1] * columns for _ in range(columns)]]
    for step in steps:
        state = [list(blocks) for blocks in states[-1]]
        for message in step:
            for block in message.shards:
                state[message.target][block] += states[-1][message.source][block]
                state[message.source][block] = 0
        states.append(state)
    if any(states[-1][c][c] != columns for c in range(columns)):
        raise ValueError(f"the last step leaves {states[-1]}")
    return states


def centre(column: int, cells: int) -> float:
    """The middle of a column whose box has that many cells."""
    return column * (cells * CELL + 0.75) + cells * CELL / 2


def box(ax: Axes, column: int, row: int, cells: list[str | None]) -> None:
    """A host's or rank's memory: one cell per shard, with its text, or empty."""
    left = centre(column, len(cells)) - len(cells) * CELL / 2
    for i, text in enumerate(cells):
        fill = "none" if text is None else COLOURS[i % len(COLOURS)]
        ax.add_patch(
            Rectangle(
                (left + i * CELL, -row * PITCH - WIDTH / 2),
                CELL,
                WIDTH,
                facecolor=fill,
                edgecolor="#8a94a3",
                linewidth=0.8,
                alpha=0.85 if text else 1,
            )
        )
        if text:
            ax.text(
                left + (i + 0.5) * CELL,
                -row * PITCH,
                text,
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )


def arrows(ax: Axes, step: Step, row: int, cells: int) -> None:
    """The messages between one row of boxes and the next."""
    for message in step:
        ax.add_patch(
            FancyArrowPatch(
                (centre(message.source, cells), -row * PITCH - WIDTH / 2 - 0.04),
                (centre(message.target, cells), -(row + 1) * PITCH + WIDTH / 2 + 0.04),
                arrowstyle="-|>",
                mutation_scale=9,
                linewidth=1.1,
                color=COLOURS[message.shards[0] % len(COLOURS)],
                alpha=0.9,
            )
        )


def draw(
    name: str,
    rows: list[list[list[str | None]]],
    steps: list[Step],
    columns: list[str],
    labels: list[str],
) -> None:
    """One picture: a row of boxes for each state, the messages between them, names at the edges."""
    cells = len(rows[0][0])
    right = centre(len(columns) - 1, cells) + cells * CELL / 2
    figure, ax = plt.subplots(figsize=((right + 2.3) * 0.95, len(rows) * PITCH * 0.62 + 0.5))
    for row, state in enumerate(rows):
        for column, shown in enumerate(state):
            box(ax, column, row, shown)
        ax.text(-0.25, -row * PITCH, labels[row], ha="right", va="center", fontsize=9)
        if row < len(steps):
            arrows(ax, steps[row], row, cells)
    for column, text in enumerate(columns):
        ax.text(centre(column, cells), 0.42, text, ha="center", fontsize=9, weight="bold")
    ax.set_xlim(-2.0, right + 0.3)
    ax.set_ylim(-(len(rows) - 1) * PITCH - 0.4, 0.75)
    ax.axis("off")
    figure.savefig(DOCS / f"algorithm-{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_gather(
    name: str,
    steps: list[Step],
    columns: list[str],
    shards: int,
    own: Callable[[int], Iterable[int]],
    labels: list[str],
) -> None:
    """A picture of an AllGather: the shards that each column has."""
    states = gathered(steps, len(columns), shards, own)
    rows: list[list[list[str | None]]] = [
        [[str(i) if i in has else None for i in range(shards)] for has in state] for state in states
    ]
    draw(name, rows, steps, columns, labels)


def numbered(ranks: int) -> Callable[[int, int], int]:
    """The rank of a host and a local index, with so many ranks per host."""
    return lambda host, local: host * ranks + local


def pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Each pair of different local indices, in both directions."""
    return permutations(range(ranks), 2)


def joint(hosts: int, ranks: int) -> list[Step]:
    """One rank of a host sends all shards of its host to one other host; then the host shares."""
    rank = numbered(ranks)
    within = [
        Message(rank(h, a), rank(h, b), (rank(h, a),))
        for h in range(hosts)
        for a, b in pairs(ranks)
    ]
    between = [
        Message(
            rank(h, d - 1), rank((h + d) % hosts, d - 1), tuple(rank(h, r) for r in range(ranks))
        )
        for h in range(hosts)
        for d in range(1, hosts)
    ]
    spread = [
        Message(rank(h, d - 1), rank(h, b), tuple(rank((h - d) % hosts, r) for r in range(ranks)))
        for h in range(hosts)
        for d in range(1, hosts)
        for b in range(ranks)
        if b != d - 1
    ]
    return [within, between, spread]


def rails(hosts: int, ranks: int) -> list[Step]:
    """Each rank sends its shard to the rank of its local index on each host; hosts share."""
    rank = numbered(ranks)
    between = [
        Message(rank(h, r), rank(o, r), (rank(h, r),))
        for h in range(hosts)
        for o in range(hosts)
        if o != h
        for r in range(ranks)
    ]
    within = [
        Message(rank(h, a), rank(h, b), tuple(rank(o, a) for o in range(hosts)))
        for h in range(hosts)
        for a, b in pairs(ranks)
    ]
    return [between, within]


def main() -> None:
    """Draws all pictures."""
    hosts = [f"host {i}" for i in range(4)]
    draw_gather(
        "direct",
        direct(4),
        hosts,
        4,
        lambda c: [c],
        ["at first", "after step 1", "after step 2", "after step 3"],
    )
    draw_gather(
        "log",
        log(4),
        hosts,
        4,
        lambda c: [c],
        ["at first", "after 1 hop", "after 2 hops"],
    )
    ranks = [f"rank {i}\nhost {'ab'[i // 2]}" for i in range(4)]
    draw_gather(
        "rails",
        rails(2, 2),
        ranks,
        4,
        lambda c: [c],
        ["at first", "along the rails", "inside hosts"],
    )
    joined = [f"rank {i}\nhost {'abc'[i // 2]}" for i in range(6)]
    draw_gather(
        "joint",
        joint(3, 2),
        joined,
        6,
        lambda c: [c],
        ["at first", "inside hosts", "between hosts", "inside hosts"],
    )
    mirror = [[Message(m.target, m.source, m.shards) for m in step] for step in reversed(direct(4))]
    sums = summed(mirror, 4)
    draw(
        "reduce-scatter",
        [[[str(n) if n else None for n in blocks] for blocks in state] for state in sums],
        mirror,
        hosts,
        ["at first", "after step 1", "after step 2", "after step 3"],
    )


if __name__ == "__main__":
    main()
