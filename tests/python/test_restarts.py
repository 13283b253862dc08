"""Ranks that meet at a store that earlier ranks have used, as torchrun's restarted ranks do."""

from __future__ import annotations

import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import ranks
from harness.world import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="torch's Gloo reads old addresses")
SCRIPT = Path(__file__).parent / "scripts" / "restarted_rank.py"


def start(port: int, rank: int, size: int) -> subprocess.Popen[str]:
    words = (str(port), str(rank), str(size))
    return ranks.start(str(SCRIPT), *words, SMDDP_HOST_ID=f"host-{rank % 2}")


def test_ranks_restart_over_one_store_in_other_numbers() -> None:
    """With fewer ranks, with more again, the fallback included; one rank comes late each time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    for size, late in ((3, 2), (2, 0), (3, 1)):
        job = [start(store.port, rank, size) for rank in range(size) if rank != late]
        time.sleep(0.5)
        job.append(start(store.port, late, size))
        outputs = [process.communicate(timeout=60)[0] for process in job]
        for process, output in zip(job, outputs, strict=True):
            assert process.returncode == 0, output
            assert f"sum {sum(range(size))}" in output
    # What ranks publish of themselves is removed again.
    assert not [key for key in store.list_keys() if "rank_info" in key]
    contacts = [key for key in store.list_keys() if key.endswith("smddp-report/contact/0")]
    assert len(set(contacts)) == 3  # no report reads what a rank before has left
