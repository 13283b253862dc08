"""A group that can't be made: all ranks raise at once, with the rank that failed and its reason.

The C++ tests fail every single step of it; these go through torch's store and its ``new_group``.
"""

from __future__ import annotations

import subprocess
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import ranks
from harness.ports import free_port
from harness.programs import Programs

STORE = """
    import sys, time
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print("up", flush=True)
    time.sleep(60)
"""
WAITS = """
    import os, sys
    from datetime import timedelta
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), timeout=timedelta(seconds=50))
    print("up", flush=True)
    try:
        dist.init_process_group("smddp", store=store, rank=0, world_size=2)
    except RuntimeError as error:
        print("RAISED", error, flush=True)
    os._exit(0)
"""


def test_a_store_that_dies_ends_the_wait_for_the_others() -> None:
    port = str(free_port())
    store = ranks.start("-c", textwrap.dedent(STORE), port)
    waits = None
    try:
        assert store.stdout is not None
        assert store.stdout.readline() == "up\n"
        waits = ranks.start("-c", textwrap.dedent(WAITS), STORE=port)
        assert waits.stdout is not None
        assert waits.stdout.readline() == "up\n"
        time.sleep(2)
        store.kill()
        died = time.monotonic()
        printed, _ = waits.communicate(timeout=20)
        assert time.monotonic() - died < 5
        assert "RAISED" in printed, printed
        assert "the rendezvous store failed" in printed, printed
        assert "frame #" not in printed.partition("RAISED")[2], printed
    finally:
        for process in (store, waits):
            if process is not None:
                process.kill()
                process.communicate()


CORRECTED = """
from deepspeed_smddp import SmddpConfigError
if rank == 1:
    os.environ["SMDDP_CODING"] = "maybe"
    try:
        join()
    except SmddpConfigError as error:
        print(error)
    os.environ["SMDDP_CODING"] = "on"
join()
x = torch.ones(3)
dist.all_reduce(x)
print(x.sum().item())
"""


def test_a_rank_that_corrects_its_settings_meets_the_others() -> None:
    """torch numbers the groups of a process, those too that could not be made."""
    ends = Programs("AB", CORRECTED, env={"SMDDP_TIMEOUT_SECONDS": "10"}).end()
    assert all(end.output.endswith("6.0\n") for end in ends), ends
    assert "SMDDP_CODING" in ends[1].output


# ---- a store that earlier ranks have used, as restarted ranks of torchrun have it

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
