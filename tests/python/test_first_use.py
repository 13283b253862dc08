"""A device's first collectives are compared with their known results, on the device of threads.

That right results pass, and are not counted, test_collectives.py shows: it counts all calls.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import host_device
from harness.host_device import ENVIRONMENT, KERNEL, host_empty
from harness.variables import debug
from harness.worker import Context
from harness.world import BACKEND, WorldError, fresh

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="development run on gloo")

GLOO = "fallback:gloo"


def all_gather(ctx: Context) -> None:
    part, whole = host_empty(1000, torch.float32), host_empty(1000 * ctx.size, torch.float32)
    part.fill_(ctx.rank)
    dist.all_gather_into_tensor(whole, part)
    assert whole.view(ctx.size, -1)[:, 999].tolist() == list(range(ctx.size))


def reduce_scatter(ctx: Context, group: dist.ProcessGroup | None = None) -> None:
    part, whole = host_empty(1000, torch.float32), host_empty(1000 * ctx.size, torch.float32)
    whole.fill_(ctx.rank + 1)
    dist.reduce_scatter_tensor(part, whole, group=group)
    wanted = ctx.size * (ctx.size + 1) / 2
    assert part.min().item() == part.max().item() == wanted


def one_rank_misreads(ctx: Context) -> dict[str, int]:
    from deepspeed_smddp import _C
    from deepspeed_smddp.distributed import backend

    all_gather(ctx)
    host_device.calls(ctx, 1)  # it is counted by now
    backend.reset_statistics()
    _C.host_device_misreads_peers(ctx.rank == 1)
    reduce_scatter(ctx)
    reduce_scatter(ctx)
    # The device has recovered, but this process trusts the path no more; others it does.
    _C.host_device_misreads_peers(False)
    group = dist.new_group()
    reduce_scatter(ctx, group)
    dist.all_reduce(host_empty(1000, torch.float32), group=group)
    return host_device.calls(ctx, 4)


def test_a_wrong_result_leaves_the_path_to_the_fallback_on_all_ranks() -> None:
    with fresh("AAA", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
        for taken in world.run(one_rank_misreads):
            assert taken == {f"reduce_scatter {GLOO}": 3, f"all_reduce {KERNEL}": 1}


def test_without_the_check_the_wrong_result_is_returned() -> None:
    # The other ranks wait for the one that has found it.
    env = {**ENVIRONMENT, **debug(check_first_use=0), "SMDDP_TIMEOUT_SECONDS": "3"}
    with fresh("AAA", env=env) as world, pytest.raises(WorldError, match="assert") as raised:
        world.run(one_rank_misreads)
    assert 1 in raised.value.failures
