"""Where ranks live: one letter per rank, its host.

"AABB" is two hosts of two ranks, "ABAB" the same with the ranks dealt out in turn, "ABBB" one rank
on host A and three on host B.
"""

from __future__ import annotations

from collections.abc import Sequence


def nodes(layout: str) -> list[list[int]]:
    """The ranks of each host, hosts in the order in which their first rank appears."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(layout):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def local_rank(layout: str, rank: int) -> int:
    return layout[:rank].count(layout[rank])


def restrict(layout: str, ranks: Sequence[int]) -> str:
    """The layout that a subgroup of ``ranks`` sees."""
    return "".join(layout[rank] for rank in ranks)
