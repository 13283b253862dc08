"""What a group of smddp leaves to NCCL of GPUs' programs: recorded collectives, MemPools, settings.

There is no NCCL here: Gloo stands in for it, on the emulated device or by a factory of the test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from harness import host_device
from harness.host_device import ENVIRONMENT, host_empty
from harness.worker import Context
from harness.world import WorldError, fresh

GLOO = "fallback:gloo"
RECORDED = "a CUDA graph is being recorded"


def recorded_sum(ctx: Context) -> tuple[dict[str, int], int]:
    """An AllReduce that a graph records: the paths taken, and the commands in the graph."""
    from deepspeed_smddp import _C
    from deepspeed_smddp.distributed import backend

    total = host_empty(1000, torch.float32).fill_(1)
    dist.all_reduce(total)  # outside, where the first result is checked
    host_device.calls(ctx, 1)
    backend.reset_statistics()
    total.fill_(ctx.rank + 1)
    _C.host_device_records(True)
    dist.all_reduce(total)
    commands = _C.host_device_records(False)
    assert total[0].item() == total[999].item() == ctx.size * (ctx.size + 1) / 2
    return host_device.calls(ctx, 1), commands


def test_between_hosts_the_fallback_carries_what_a_graph_records() -> None:
    with fresh("AB", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
        for taken, commands in world.run(recorded_sum):
            assert taken == {f"all_reduce {GLOO}": 1}
            assert commands == 0  # Gloo's are no stream's
        assert RECORDED in world.log(0)


def test_a_recorded_collective_is_refused_where_the_fallback_is_forbidden() -> None:
    env = {**ENVIRONMENT, "SMDDP_FALLBACK": "error"}
    with fresh("AB", env=env) as world, pytest.raises(WorldError, match=RECORDED):
        world.run(recorded_sum)


# The store of one rank's group; `made`: what the factory of NCCL's group was asked for.
GROUP = """
import torch, torch.distributed as dist
from deepspeed_smddp.distributed import backend
made = []
def stand_in(store, options, timeout, given):
    made.append("nccl")
    return dist.ProcessGroupGloo(store, 0, 1, timeout)
backend._nccl = stand_in
dist.init_process_group("smddp", rank=0, world_size=1, store=dist.HashStore())
group = dist.group.WORLD._get_backend(torch.device("cpu"))
"""


def program(text: str, **environment: str) -> Any:
    done = ranks.python(GROUP + text + "\ndist.destroy_process_group()\n", **environment)
    assert done.returncode == 0, done.stderr
    return done


def test_an_eager_connection_is_that_of_nccl_and_made_once() -> None:
    program(
        "assert not group.supports_splitting and not made\n"
        "for _ in range(2): group.eager_connect_single_device(torch.device('cuda', 0))\n"
        "assert made == ['nccl'], made\n"
        "group.eager_connect_single_device(torch.device('cpu'))\n"
    )


def test_memory_pools_are_nccls_or_refused() -> None:
    program(
        "try:\n"
        "    group.mem_allocator\n"
        "except RuntimeError as error:\n"
        "    assert 'getMemAllocator' in str(error), error  # Gloo's refusal\n"
        "else:\n"
        "    raise AssertionError('an allocator of CPU memory')\n"
        "assert made == ['nccl'], made\n"
    )


SETTING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "200"}


def test_settings_of_nccls_groups_that_have_no_effect_are_named_once() -> None:
    twice = "dist.new_group()\n"
    said = program(twice, **SETTING).stderr
    sentence = [line for line in said.splitlines() if "TORCH_NCCL" in line]
    assert len(sentence) == 1, said
    assert all(name in sentence[0] for name in SETTING)
    doctor = "from deepspeed_smddp.diagnostics.doctor import checks\n"
    doctor += "print([one.text for one in checks.findings() if one.name == 'TORCH_NCCL_*'])\n"
    assert all(name in program(doctor, **SETTING).stdout for name in SETTING)
    # What torchrun sets by itself is no wish of the user.
    assert "TORCH_NCCL" not in program(twice, TORCH_NCCL_ASYNC_ERROR_HANDLING="1").stderr
