"""The TCP sockets of a process; resets connections, as a firewall does that lost them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def reset_connections(first: int, second: int) -> int:
    """Resets all TCP connections between the processes; how many there were."""
    ends = {remote: local for local, remote in _connections(second).values()}
    count = 0
    for descriptor, (local, remote) in _connections(first).items():
        if ends.get(local) == remote:
            _reset(first, descriptor)
            count += 1
    return count


def listening_ports(pid: int) -> list[int]:
    return sorted(int(local.rpartition(":")[2], 16) for local, _ in _sockets(pid, "0A").values())


def _connections(pid: int) -> dict[int, tuple[str, str]]:
    return _sockets(pid, "01")


def _sockets(pid: int, state: str) -> dict[int, tuple[str, str]]:
    """Those of a process in a state of the kernel, by descriptor: both addresses, in hex."""
    table = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == state:
            table[fields[9]] = (fields[1], fields[2])
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
            if inode in table:
                found[int(entry.name)] = table[inode]
    return found


def _reset(pid: int, descriptor: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(pidfd)
    # To connect to no address ends a connection with a reset.
    with socket.socket(fileno=copy):
        nowhere = (ctypes.c_char * 16)()  # AF_UNSPEC
        if _libc.connect(copy, nowhere, len(nowhere)) != 0:
            raise OSError(ctypes.get_errno(), "connect")
