"""The hosts of the ranks: one letter per rank.

"AABB" is two hosts of two ranks, "ABAB" the same with alternating ranks, "ABBB" one rank on host A
and three on host B.
"""

from __future__ import annotations

from collections.abc import Sequence


def hosts(layout: str) -> list[list[int]]:
    """The ranks of each host, in the order of the hosts' first ranks."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(layout):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def local_rank(layout: str, rank: int) -> int:
    return layout[:rank].count(layout[rank])


def restrict(layout: str, ranks: Sequence[int]) -> str:
    """The layout of a subgroup of ``ranks``."""
    return "".join(layout[rank] for rank in ranks)
