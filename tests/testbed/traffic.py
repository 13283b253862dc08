"""Bulk TCP from this host to others and back, all at once, as fast as the links allow.

This file is run on each host by its path. The single argument is a JSON array: this host's
addresses, one per plane, and the other hosts' addresses. It begins to send at the first line on
standard input. When it listens, and at each line, it prints a JSON array: the time (monotonic, in
seconds) and the payload bytes that it has received.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time

PORT = 5201
CHUNK = 256 << 10  # bytes for one system call

counts: list[list[int]] = []  # of each connection, a number that its thread alone writes


def drain(connection: socket.socket, count: list[int]) -> None:
    """Receive until the other end closes."""
    buffer = bytearray(CHUNK)
    with contextlib.suppress(ConnectionError):
        while got := connection.recv_into(buffer):
            count[0] += got


def accept(server: socket.socket) -> None:
    """Receive from every host that connects."""
    while True:
        connection, _ = server.accept()
        counts.append([0])
        threading.Thread(target=drain, args=(connection, counts[-1]), daemon=True).start()


def send(address: str) -> None:
    """Send until the other end closes the connection."""
    payload = memoryview(bytes(CHUNK))
    with contextlib.suppress(ConnectionError), socket.create_connection((address, PORT)) as to:
        while True:
            to.sendall(payload)


def main() -> None:
    """See the docstring of this module."""
    own, others = json.loads(sys.argv[1])
    for address in own:
        server = socket.create_server((address, PORT), backlog=1024)
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    print("[0, 0]", flush=True)
    for number, _ in enumerate(sys.stdin):
        for address in others if number == 0 else []:
            threading.Thread(target=send, args=(address,), daemon=True).start()
        print([time.monotonic(), sum(count[0] for count in list(counts))], flush=True)


if __name__ == "__main__":
    main()
