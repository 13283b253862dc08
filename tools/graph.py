"""Cycles in a graph of files, for the checks of includes and of imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def cycles(edges: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Each cycle that a depth-first search closes: its files in order, the first once more."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for target in edges[name]:
                yield from visit(target, [*path, name])
            done.add(name)

    for name in edges:
        yield from visit(name, [])
