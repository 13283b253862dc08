"""torchrun restarts the demo after the loss of a host: it goes on with the ranks that are left."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ranks
from harness.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300, method="signal"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 60


def agent(host: str, ranks_here: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """torchrun on one of up to two hosts."""
    config = EXAMPLES.parent / "ds_configs" / "quickstart.json"
    small = ("--seq-len", "32", "--batch", "2", "--layers", "1", "--hidden", "64")
    with open(folder / f"{host}.log", "wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"),
                *(f"--nproc-per-node={ranks_here}", "--max-restarts=3", "--rdzv-backend=c10d"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1"),
                f"--rdzv-conf=is_host={int(host == 'A')},last_call_timeout=3",
                *(str(EXAMPLES / "train.py"), "--deepspeed_config", str(config), *small),
                *("--data", str(folder / "text.txt"), "--output", str(folder / "run")),
                *("--steps", str(STEPS), "--save-every", "10", "--elastic", "--no-progress"),
            ],
            env=ranks.environment(SMDDP_HOST_ID=f"host-{host}", PYTHONFAULTHANDLER="1"),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The agent and its ranks, as if their host were gone."""
    for line in subprocess.check_output(["ps", "-eo", "pid,ppid"], text=True).splitlines()[1:]:
        pid, parent = map(int, line.split())
        if parent == process.pid:
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def test_the_demo_goes_on_without_a_host(tmp_path: Path) -> None:
    """From its checkpoint, with 2 ranks instead of 3, without a person."""
    text = Path(textwrap.__file__).read_bytes() + Path(argparse.__file__).read_bytes()
    (tmp_path / "text.txt").write_bytes(text)
    port = free_port()
    agents = {host: agent(host, count, port, tmp_path) for host, count in (("A", 2), ("B", 1))}
    try:
        latest = tmp_path / "run" / "checkpoint" / "latest"
        end = time.monotonic() + 120
        while not latest.exists():
            log = (tmp_path / "A.log").read_text(errors="replace")
            assert time.monotonic() < end and agents["A"].poll() is None, log[-6000:]
            time.sleep(0.1)
        kill(agents["B"])
        code = agents["A"].wait(150)
    finally:
        for process in agents.values():
            if process.poll() is None:
                kill(process)
    log = (tmp_path / "A.log").read_text(errors="replace")
    assert code == 0, log[-6000:]
    assert "3 ranks on cpu" in log and "2 ranks on cpu" in log, log[-6000:]
    resumed = re.search(r"resuming after step (\d+)", log)
    assert resumed is not None and int(resumed[1]) % 10 == 0, log[-6000:]
    rows = (tmp_path / "run" / "losses.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(1, STEPS + 1))
