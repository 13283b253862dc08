"""Ports for the rendezvous of ranks; two test processes never choose the same one.

A port that is only probed (bound to 0, closed, handed on) may be taken by another process before
the ranks bind it: by a second test process, or as the local port of any connection. So each test
process claims a block of ports below those that the kernel gives to connections, by listening on
the block's first port for as long as it lives, and hands out the others in turn.
"""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

BLOCK = 100
LOWEST = 10_000


def free_port() -> int:
    """A port of 127.0.0.1 that no process uses, and that no other test process chooses."""
    for _ in range(BLOCK):
        port = next(_ports())
        try:
            _listen(port).close()
        except OSError:  # in use, or a connection to it ended a moment ago
            continue
        return port
    raise OSError(f"none of the {BLOCK} ports up to {port} is free")


@functools.cache
def _ports() -> Iterator[int]:
    first, _ = _claim()
    return itertools.cycle(range(first + 1, first + BLOCK))


@functools.cache
def _claim() -> tuple[int, socket.socket]:
    """The first port of a block, and the socket that keeps other test processes out of it."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = max(int(text.split()[0]), LOWEST + 50 * BLOCK)
    for first in range(LOWEST, end - BLOCK, BLOCK):
        try:
            return first, _listen(first)
        except OSError:
            continue
    raise OSError(f"no free block of {BLOCK} ports from {LOWEST} to {end}")


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening
