"""The order in which pairs of hosts are measured: a round-robin tournament.

In each round a host is in one pair at most, so that pairs measured at the same time share no link
of a host. After all rounds each host was in a pair with each other one.
"""

from __future__ import annotations

# Rounds, at most: more hosts than that are measured with some of the others.
MOST_ROUNDS = 31
# Few hosts are measured several times, at other moments: what disturbs one time passes.
_REPEATED_ROUNDS = 16
_MOST_TIMES = 3


def rounds(hosts: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """The pairs of each round, the smaller number first; at most ``most`` rounds, evenly chosen.

    The circle method: number the hosts 0..n-1 with n even (an odd number gets a host that does not
    exist); in round r, host n-1 meets r, and r+i meets r-i modulo n-1.
    """
    if hosts < 2:
        return []
    n = hosts + hosts % 2
    chosen = range(n - 1) if n - 1 <= most else [i * (n - 1) // most for i in range(most)]
    found = []
    for r in chosen:
        pairs = [(r, n - 1)]
        pairs += [((r + i) % (n - 1), (r - i) % (n - 1)) for i in range(1, n // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < hosts])
    return found


def schedule(hosts: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """All rounds, up to three times over, as long as that makes 16 rounds at most."""
    once = rounds(hosts, most)
    return once * max(1, min(_MOST_TIMES, _REPEATED_ROUNDS // max(1, len(once))))


def partner(pairs: list[tuple[int, int]], host: int) -> int | None:
    """The other host of this host's pair in a round; None if it has none."""
    for first, second in pairs:
        if host in (first, second):
            return second if host == first else first
    return None
