"""Bulk TCP from this host to others and back, all at once, as fast as the links allow.

This file is run on each host by its path. The single argument is a JSON object: ``listen`` (this
host's addresses, one per plane), ``connect`` (the other hosts' addresses), ``port``, ``windows``
(their number), ``window`` (seconds of each). The program prints one line when it listens. It then
reads a line with the time (monotonic, in seconds) at which the first window starts, and begins to
send. It answers with a JSON array: payload bytes received per second in each window. A further line
on standard input, or its end, ends the program.
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
    """Receive from every host that connects."""
    while True:
        connection, _ = server.accept()
        sinks.append(Sink(connection))
        threading.Thread(target=sinks[-1].drain, daemon=True).start()


def send(address: str, port: int) -> None:
    """Send until the other end closes the connection."""
    payload = memoryview(bytes(CHUNK))
    with socket.create_connection((address, port)) as connection:
        try:
            while True:
                connection.sendall(payload)
        except ConnectionError:
            pass


def main() -> None:
    """See the docstring of this module."""
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
    sys.stdin.readline()  # the other hosts may still count what this host sends
    os._exit(0)


if __name__ == "__main__":
    main()
