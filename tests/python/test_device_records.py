"""Collectives on a GPU in the flight recorder and in reports; threads emulate the GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import host_device
from harness.host_device import COPIES, KERNEL, host_empty, paths
from harness.variables import debug
from harness.worker import Context
from harness.world import Pool
from test_reports import SECONDS, end_after, job, why

# The operations that check the first ones would be recorded, too.
ENVIRONMENT = {**host_device.ENVIRONMENT, **debug(check_first_use=0)}
ON_DEVICE = " (device)"
NUMEL = 1000


def one_of_each(ctx: Context) -> dict[str, Any]:
    from deepspeed_smddp import _C

    part = host_empty(NUMEL, torch.float32).fill_(1)
    whole = host_empty(NUMEL * ctx.size, torch.float32)
    works = [dist.all_gather_into_tensor(whole, part, async_op=True)]
    works.append(dist.reduce_scatter_tensor(part, whole, async_op=True))
    works.append(dist.all_reduce(part, async_op=True))
    for work in works:
        work.wait()
    dist.barrier()
    end = time.monotonic() + 5
    # The end is noted shortly after the device has finished.
    while any(row["state"] != "done" for row in _C.flight_record()) and time.monotonic() < end:
        time.sleep(0.005)
    dist.barrier()
    return {"rows": _C.flight_record(), "groups": _C.group_states()}


@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_each_collective_is_recorded_once_with_its_times(worlds: Pool, layout: str) -> None:
    world = worlds(layout, env=ENVIRONMENT)
    for seen in world.run(one_of_each):
        (group,) = seen["groups"]
        rows = [row for row in seen["rows"] if row["group"] == group["name"] + ON_DEVICE][-3:]
        assert [row["operation"] for row in rows] == ["all_gather", "reduce_scatter", "all_reduce"]
        first = rows[0]["sequence"]
        assert [row["sequence"] for row in rows] == [first, first + 1, first + 2]
        whole = NUMEL * 4 * len(layout)
        assert [row["bytes"] for row in rows] == [whole, whole, NUMEL * 4]
        assert [row["dtype"] for row in rows] == ["float32"] * 3
        taken = paths(layout) if "B" in layout else dict.fromkeys(paths(layout), KERNEL)
        taken["all_gather"] = taken["all_gather"] if "B" in layout else COPIES
        for row in rows:
            assert row["path"] == taken[row["operation"]]
            assert row["called"] <= row["started"] <= row["last_byte"]
            assert row["called"] <= row["wait_entered"] <= row["wait_left"]
            assert row["first_byte"] is None  # no processor sees it
        # What the CPU exchanges for them ends, and does not mix with the group's own operations.
        own = [row for row in seen["rows"] if row["group"] == group["name"]]
        assert all(row["state"] == "done" for row in seen["rows"])
        numbers = [row["sequence"] for row in own]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_rank_that_skips_a_collective_on_the_gpu_is_named(tmp_path: Path) -> None:
    program = f"""
    join()
    from deepspeed_smddp import _C
    x = _C.host_device_empty(4000).view(torch.float32)
    y = _C.host_device_empty(16000).view(torch.float32)
    dist.all_gather_into_tensor(y, x); limit({SECONDS})
    if rank == 3:
        time.sleep(60)
    dist.all_gather_into_tensor(y, x)
    """
    sentence = why(end_after(job(tmp_path, program, env=ENVIRONMENT), (0, 1, 2)))
    assert sentence.startswith("rank 3 (host-B) is in time.sleep, called at train.py:8"), sentence
    assert f"has not called all_gather #2 of group '0{ON_DEVICE}' (15.6" in sentence or (
        f"has not called all_gather #2 of group '0{ON_DEVICE}' (16000 bytes)" in sentence
    ), sentence
