"""``smddp bench`` alone: starts ranks of its own on this host, and ends with them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

_OTHERS_SECONDS = 30.0  # that the other ranks have to end by themselves after one has failed


def run(ranks: int) -> int:
    """Runs this command line again as ``ranks`` ranks; returns the status of one that failed.

    SIGINT and SIGTERM reach the ranks as SIGINT, a second one kills them.
    """
    # Port 0: the kernel chooses one that is free.
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
    )
    processes: list[subprocess.Popen[bytes]] = []
    signals = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        for process in processes:
            process.send_signal(signal.SIGINT if signals == 1 else signal.SIGKILL)

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        for rank in range(ranks):
            # In a session of its own: the terminal sends Ctrl-C to this process alone.
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "deepspeed_smddp.commands.main", *sys.argv[1:]],
                    env=_environment(rank, ranks, store.port),
                    start_new_session=True,
                )
            )
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch's name for a store that is served already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    end = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            end = min(end, time.monotonic() + _OTHERS_SECONDS)
        time.sleep(0.02)
    status = next((process.returncode for process in processes if process.returncode), 0)
    return 128 - status if status < 0 else status
