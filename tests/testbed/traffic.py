"""Bulk TCP from this host to others and back, all at once, as fast as the cables allow.

Run on each host by its path. The single argument is a JSON object: ``listen`` (this host's
addresses, one per plane), ``connect`` (the other hosts' addresses), ``port``, ``windows`` (how
many), ``window`` (seconds of each). One line on standard output says that it listens; a line on
standard input holds the time (monotonic, in seconds) of the first window's start and starts the
sending. The answer is a JSON array: payload bytes
received per second in each window; a further line, or the end of standard input, ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time

CHUNK = 256 << 10  # bytes for one system call


class Sink:
    """Counts the bytes of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.received = 0
        self._connection = connection

    def drain(self) -> None:
        """Read until the other end closes."""
        buffer = bytearray(CHUNK)
        try:
            while count := self._connection.recv_into(buffer):
                self.received += count
        except ConnectionError:
            pass


def accept(server: socket.socket, sinks: list[Sink]) -> None:
    """Serve everyone who connects."""
    while True:
        connection, _ = server.accept()
        sinks.append(Sink(connection))
        threading.Thread(target=sinks[-1].drain, daemon=True).start()


def send(address: str, port: int) -> None:
    """Send until nobody listens any more."""
    payload = memoryview(bytes(CHUNK))
    with socket.create_connection((address, port)) as connection:
        try:
            while True:
                connection.sendall(payload)
        except ConnectionError:
            pass


def main() -> None:
    """See the module's text."""
    order = json.loads(sys.argv[1])
    sinks: list[Sink] = []
    for address in order["listen"]:
        server = socket.create_server((address, order["port"]), backlog=1024)
        threading.Thread(target=accept, args=(server, sinks), daemon=True).start()
    print("listening", flush=True)
    start = float(sys.stdin.readline())
    for address in order["connect"]:
        threading.Thread(target=send, args=(address, order["port"]), daemon=True).start()
    marks = []
    for mark in range(order["windows"] + 1):
        time.sleep(max(0.0, start + mark * order["window"] - time.monotonic()))
        marks.append((time.monotonic(), sum(sink.received for sink in list(sinks))))
    rates = [(b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(marks)]
    print(json.dumps(rates), flush=True)
    sys.stdin.readline()  # the others may still be counting what this host sends
    os._exit(0)


if __name__ == "__main__":
    main()
