"""Starts a command once per rank on the hosts of a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from .bed import Testbed


def rank_environment(bed: Testbed, host: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Variables that torchrun would set for this rank; ``Host`` adds the host's own variables."""
    return {
        "RANK": str(host * local_size + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(len(bed.hosts) * local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(bed.hosts)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def start_ranks(
    bed: Testbed,
    argv: Sequence[str],
    ranks_per_host: int = 1,
    env: Mapping[str, str | None] | None = None,
    **kw: Any,
) -> list[subprocess.Popen[Any]]:
    """Start ``argv`` ``ranks_per_host`` times on every host; the processes in rank order.

    ``env`` and ``kw`` are as in ``Host.popen``.
    """
    return [
        host.popen(
            argv, {**rank_environment(bed, host.index, local, ranks_per_host), **(env or {})}, **kw
        )
        for host in bed.hosts
        for local in range(ranks_per_host)
    ]


def _prefix(label: str, source: IO[str], sink: IO[str]) -> None:
    for line in source:
        sink.write(f"{label} {line.rstrip(chr(10))}\n")
        sink.flush()


def run_ranks(bed: Testbed, argv: Sequence[str], ranks_per_host: int = 1) -> int:
    """Run ``argv`` on all ranks, with ``[rank]`` before each line of output.

    Returns the exit status of the first rank that failed, or 0. When a rank fails, the others get
    SIGTERM, and SIGKILL after five seconds. A rank that a signal ended has the status 128 + signal.
    When all ranks have ended, every other process on the hosts is killed.
    """
    pipe = subprocess.PIPE
    started = start_ranks(
        bed,
        argv,
        ranks_per_host,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
    )
    readers = []
    for rank, process in enumerate(started):
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            reader = threading.Thread(target=_prefix, args=(f"[{rank}]", source, sink), daemon=True)
            reader.start()
            readers.append(reader)
    status = _wait(started)
    bed.end_processes()  # a process that a rank left behind may hold its output open
    for reader in readers:
        reader.join()
    return status


def _wait(processes: list[subprocess.Popen[Any]]) -> int:
    running = dict(enumerate(processes))
    bad = 0
    end = float("inf")
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            status = 128 - code if code < 0 else code
            if status and not bad:
                bad, end = status, time.monotonic() + 5
                print(f"[testbed] rank {rank} ended with {_describe(code)}", file=sys.stderr)
                for other in running.values():
                    other.send_signal(signal.SIGTERM)
        if time.monotonic() > end:
            for process in running.values():
                process.kill()
        time.sleep(0.02)
    return bad


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
