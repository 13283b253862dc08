"""The parts of the GPU path that need no GPU: processes, tensors, flags, imports, failures.

``SMDDP_DEVICE=host`` makes threads emulate the device: streams that run beside the caller, memory
that other processes map, flags that one stream sets and another waits for.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import host_device
from harness.cases import Case
from harness.failing import at_once, raised_by
from harness.host_device import BY_NIC, COPIES, ENVIRONMENT, KERNEL, host_empty, paths
from harness.on_layouts import Body, OnLayouts
from harness.variables import debug
from harness.worker import Context
from harness.world import Pool, World, WorldError, fresh

on = OnLayouts()


def on_device(worlds: Pool, layout: str) -> World:
    world = worlds(layout, env=ENVIRONMENT)
    world.run(host_device.use_host)
    return world


def gather(ctx: Context, numel: int, turn: float) -> None:
    part, whole = host_empty(numel, torch.float32), host_empty(numel * ctx.size, torch.float32)
    part.fill_(ctx.rank + turn)
    dist.all_gather_into_tensor(whole, part)
    wanted = [float(rank + turn) for rank in range(ctx.size)]
    assert whole.view(ctx.size, -1)[:, -1].tolist() == wanted


def free_and_remap(ctx: Context) -> dict[str, int]:
    gather(ctx, 1, 0.0)  # a first call is compared with its known result, which maps memory too
    before = host_device.imports(ctx)
    kept = host_empty(1000, torch.float32)
    out = host_empty(1000 * ctx.size, torch.float32)
    for _ in range(5):
        dist.all_gather_into_tensor(out, kept)
    dist.barrier()
    middle = host_device.imports(ctx)
    # Freed and allocated again at the same addresses, many times, in two sizes.
    for turn in range(20):
        gather(ctx, 1000 + 3000 * (turn % 2), float(turn))
    after = host_device.imports(ctx)
    return {
        "first": middle["misses"] - before["misses"],
        "hits": middle["hits"] - before["hits"],
        "replaced": after["replaced"] - middle["replaced"],
        "freed_while_mapped": after["freed_while_mapped"],
    }


def test_mapped_memory_is_kept_and_follows_free_and_remap(worlds: Pool) -> None:
    for counted in on_device(worlds, "AAA").run(free_and_remap):
        assert counted["first"] == 2  # one of each peer
        assert counted["hits"] == 8
        assert counted["replaced"] > 0
        assert counted["freed_while_mapped"] == 0


@on("AAA", "ABC")
def tensors_of_both_kinds_in_one_group(ctx: Context) -> None:
    """One group, tensors on the CPU and on the device in turn, and a barrier between."""
    works = []
    for turn in range(6):
        make = host_empty if turn % 2 else lambda n, d: torch.empty(n, dtype=d)
        tensor = make(100, torch.float32).fill_(ctx.rank + turn)
        works.append((turn, tensor, dist.all_reduce(tensor, async_op=True)))
    dist.barrier()
    for turn, tensor, work in reversed(works):
        work.wait()
        assert tensor[99].item() == sum(rank + turn for rank in range(ctx.size))


@on("AA")
def wait_drops_the_tensors(ctx: Context) -> None:
    """wait() drops the tensors, though the group and the work still know the operation."""
    for _ in range(20):
        part, whole = host_empty(1000, torch.float32), host_empty(1000 * ctx.size, torch.float32)
        refs = weakref.ref(part), weakref.ref(whole)
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        work.wait()
        assert work.result()[0].data_ptr() == whole.data_ptr()
        del part
        assert refs[0]() is None
        del work, whole
        assert refs[1]() is None


class Status(Enum):
    """As DeepSpeed's ZeroParamStatus."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def gather_parameters(ctx: Context) -> dict[str, int]:
    """ZeRO-3's gathers fill the parameters' own memory on the device, by copy engines."""
    from deepspeed_smddp.deepspeed import gather as zero_gather
    from deepspeed_smddp.deepspeed import operations
    from deepspeed_smddp.distributed import backend

    operations.memory = lambda count, like: host_empty(count, like.dtype)
    params = []
    for number, numel in enumerate((1000, 7, 300_000)):
        part = -(-numel // ctx.size)
        shard = host_empty(part, torch.float32)
        shard.copy_(torch.arange(part) + ctx.rank * part + number)
        params.append(
            SimpleNamespace(
                ds_id=number,
                ds_numel=numel,
                ds_shape=torch.Size([numel]),
                ds_status=Status.NOT_AVAILABLE,
                ds_tensor=shard,
            )
        )
    init = SimpleNamespace(zero_param_process_group=None, get_partition_dp_group=lambda _: None)
    assert zero_gather.operations.serves(dist.group.WORLD, zero_gather.FEATURE)
    backend.reset_statistics()
    gathering = zero_gather._start(init, params, hpz=False)
    assert params[0].ds_status is Status.INFLIGHT
    gathering.of(params[0]).wait()
    gathering.wait()
    for number, param in enumerate(params):
        assert param.ds_status is Status.AVAILABLE
        wanted = torch.arange(param.ds_numel, dtype=torch.float32) + number
        assert torch.equal(param.data, wanted)
    return host_device.calls(ctx, 2)


def test_parameters_are_gathered_into_their_own_memory() -> None:
    with fresh("AAA", env=ENVIRONMENT) as world:
        world.run(host_device.use_host)
        for taken in world.run(gather_parameters):
            # The two small ones together.
            assert taken == {f"all_gather {COPIES}": 2}


def test_parameters_that_deepspeed_has_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    from deepspeed_smddp.deepspeed import gather as zero_gather

    def plain(*devices: str, **more: object) -> bool:
        shards = (
            SimpleNamespace(device=torch.device(device), dtype=torch.float32, **more)
            for device in devices
        )
        return zero_gather._plain([SimpleNamespace(ds_tensor=shard) for shard in shards])

    assert plain("cpu", "cpu") and not plain("cuda:1")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    assert plain("cuda:1", "cuda:1")
    assert not plain("cuda:0", "cuda:1")
    assert not plain("cpu")  # kept in host memory, needed on the GPU
    assert not plain("cuda:0", ds_quant_scale=1)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "xpu")
    assert not plain("xpu:0")


def reduce_gradients(ctx: Context) -> dict[str, int]:
    """ZeRO-3's gradients are summed by the device, where they lie."""
    from deepspeed_smddp.deepspeed import operations
    from deepspeed_smddp.deepspeed import reduce as zero_reduce
    from deepspeed_smddp.distributed import backend

    operations.memory = lambda count, like: host_empty(count, like.dtype)
    # Two lie in one bucket, side by side; their padding would reach beyond the first one's end.
    bucket = host_empty(1001 + 7, torch.bfloat16)
    gradients = [bucket[:1001].view(13, 77), bucket[1001:], host_empty(30_000, torch.bfloat16)]
    wanted = []
    for number, gradient in enumerate(gradients):
        of_rank = [
            (torch.arange(gradient.numel()) % 61 + rank + number).bfloat16()
            for rank in range(ctx.size)
        ]
        gradient.view(-1).copy_(of_rank[ctx.rank])
        mean = sum((one / ctx.size).float() for one in of_rank).bfloat16()  # type: ignore[union-attr]
        part = -(-gradient.numel() // ctx.size)
        wanted.append(mean[ctx.rank * part : (ctx.rank + 1) * part])
    assert zero_reduce.plain(gradients)
    assert zero_reduce.operations.serves(dist.group.WORLD, zero_reduce.FEATURE)
    backend.reset_statistics()
    ours = zero_reduce.reduce_scatter(gradients, dist.group.WORLD)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    return host_device.calls(ctx, 1)


def test_gradients_are_summed_where_they_lie() -> None:
    with fresh("AAA", env=ENVIRONMENT) as world:
        world.run(host_device.use_host)
        for taken in world.run(reduce_gradients):
            assert taken == {f"reduce_scatter {KERNEL}": 1}


def test_gradients_that_deepspeed_has_to_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    from deepspeed_smddp.deepspeed import reduce as zero_reduce

    def plain(*devices: str, contiguous: bool = True) -> bool:
        gradients = [
            SimpleNamespace(
                device=torch.device(device),
                dtype=torch.bfloat16,
                is_contiguous=lambda: contiguous,
            )
            for device in devices
        ]
        return zero_reduce.plain(gradients)  # type: ignore[arg-type]

    assert plain("cpu", "cpu") and not plain("cuda:1")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    assert plain("cuda:1", "cuda:1")
    assert not plain("cuda:0", "cuda:1")
    assert not plain("cpu")  # kept in host memory
    assert not plain("cuda:0", contiguous=False)
    assert not zero_reduce.plain([])


def measured(ctx: Context) -> tuple[int, dict[str, int]]:
    """``"auto"`` measures with tensors of the device."""
    from deepspeed_smddp.distributed import backend
    from deepspeed_smddp.tuning import measure

    buffers = measure.buffers

    def of_the_device(*given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(host_empty(one.numel(), one.dtype).zero_() for one in buffers(*given))

    measure.buffers = of_the_device
    assert dist.group.WORLD is not None
    backend.reset_statistics()
    model = measure.measure(dist.group.WORLD, 0.2)
    points = len(model.allgather)
    assert points == len(model.reduce_scatter)
    assert all(point.seconds > 0 for point in model.allgather + model.reduce_scatter)
    return points, host_device.calls(ctx, 12)


def test_auto_measures_the_device(worlds: Pool) -> None:
    for points, taken in on_device(worlds, "AA").run(measured):
        assert points >= 2
        for collective in ("all_gather", "reduce_scatter"):
            assert taken[f"{collective} {paths('AA')[collective]}"] >= 4 * points


def test_the_device_that_auto_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    from deepspeed_smddp.deepspeed import auto

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert auto._device() == torch.device("cpu")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "cuda")
    assert auto._device() is None  # not known yet: DeepSpeed makes it the current one later
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert auto._device() == torch.device("cuda:3")
    monkeypatch.setattr(get_accelerator(), "device_name", lambda *_: "xpu")
    assert auto._device() is None


@on("AA")
def futures(ctx: Context) -> None:
    seen = []
    tensor = host_empty(100, torch.float32).fill_(1)
    work = dist.all_reduce(tensor, async_op=True)
    done = work.get_future().then(lambda future: seen.append(future.value()[0].sum().item()))
    done.wait()
    work.wait()
    assert work.is_completed() and seen == [100.0 * ctx.size]
    assert work.get_future().done()


@on("AAA", "ABC")
def several_groups_share_a_device(ctx: Context) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group()]
    works = []
    for _turn in range(4):
        for number, group in enumerate(groups):
            if dist.get_rank(group) < 0:
                continue
            tensor = host_empty(5000, torch.float32).fill_(1)
            works.append((number, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for number, tensor, work in works:
        work.wait()
        assert tensor[0].item() == (3 if number == 2 else 2)
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


@on("AAA")
def a_call_that_a_rank_has_yet_to_make_holds_up_no_other_group(ctx: Context) -> None:
    second = dist.new_group()
    late, tensor = (host_empty(1000, torch.float32).fill_(1) for _ in range(2))
    for group in (None, second):
        dist.all_reduce(host_empty(1000, torch.float32).fill_(1), group=group)
    if ctx.rank != 1:
        work = dist.all_reduce(late, async_op=True)
    begin = time.monotonic()
    dist.all_reduce(tensor, group=second)
    taken = time.monotonic() - begin
    if ctx.rank == 1:
        work = dist.all_reduce(late, async_op=True)
    work.wait()
    assert late[999].item() == tensor[999].item() == ctx.size
    assert taken < 0.8, taken
    dist.destroy_process_group(second)


# ---- several hosts


def want_pinned_memory(ctx: Context) -> None:
    if ctx.rank == 1:
        os.environ["SMDDP_DEBUG"] = "curve=default,hmem=0"


def test_by_nic_on_all_ranks_or_no_rank() -> None:
    with fresh("AB", env={**ENVIRONMENT, **BY_NIC}) as world:
        world.run(host_device.use_host)
        world.run(want_pinned_memory)
        for taken in world.run(host_device.check, [Case("all_gather")]):
            assert taken == {f"all_gather {paths('AB')['all_gather']}": 1}


def gather_weights(ctx: Context) -> tuple[int, int]:
    from deepspeed_smddp.distributed import backend

    part = host_empty(300_000, torch.bfloat16).fill_(ctx.rank + 1)
    whole = host_empty(300_000 * ctx.size, torch.bfloat16)
    backend.reset_statistics()
    dist.all_gather_into_tensor(whole, part)
    assert whole.view(ctx.size, -1)[:, -1].tolist() == [1, 2]
    host_device.calls(ctx, 1)
    (row,) = (row for row in backend.statistics() if row["collective"] == "all_gather")
    return row["sent_bytes"], row["sent_raw_bytes"]


def test_the_processor_codes_what_it_sends_of_pinned_memory(worlds: Pool) -> None:
    for sent, raw in worlds("AB", env={**ENVIRONMENT, "SMDDP_CODING": "on"}).run(gather_weights):
        assert raw == 600_000
        assert sent < 0.9 * raw


# ---- failures


def gather_once_more(ctx: Context) -> None:
    gather(ctx, 100, 0.0)
    gather(ctx, 100, 1.0)


def reduce_twice(ctx: Context) -> None:
    for collective in ("all_reduce", "reduce_scatter"):
        host_device.check(ctx, [Case(collective, numels=(100_003,))])


def reduce_in_vain(ctx: Context) -> None:
    dist.all_reduce(host_empty(100_003, torch.float32).fill_(1))


def test_a_killed_or_stopped_rank_is_named() -> None:
    """By gathers, and by sums of devices where each rank is alone on its host."""
    gathers = (gather_once_more, gather_once_more, "all_gather")
    what = {"AAA": gathers, "AABB": gathers, "ABC": (reduce_twice, reduce_in_vain, "all_reduce")}
    keys = [(layout, how) for layout in what for how in (signal.SIGKILL, signal.SIGSTOP)]
    env: dict[str, str | None] = {**ENVIRONMENT, "SMDDP_TIMEOUT_SECONDS": "3"}
    with at_once(((key, key[0]) for key in keys), env) as worlds:
        for (layout, how), world in worlds.items():
            before, after, _ = what[layout]
            world.run(host_device.use_host)
            world.run(before)
            world.signal(world.size - 1, how)
            world.submit_to(range(world.size - 1), after)
        for (layout, _), world in worlds.items():
            for failure in raised_by(world, list(range(world.size - 1)), 30):
                assert f"rank {world.size - 1}" in failure.message, failure
                assert what[layout][2] in failure.message, failure


def leave_in_flight(ctx: Context) -> bool:
    """Destroys the group right after the call; operations on the device finish first."""
    part, whole = host_empty(1 << 20, torch.float32), host_empty(ctx.size << 20, torch.float32)
    part.fill_(ctx.rank + 1)
    works = [dist.all_gather_into_tensor(whole, part, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return bool(whole[-1].item() == ctx.size)


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_group_is_destroyed_right_after_a_call(layout: str) -> None:
    with fresh(layout, env=ENVIRONMENT) as world:
        assert all(world.run(leave_in_flight))


def test_a_wrong_setting_is_refused_by_name() -> None:
    refused = pytest.raises(WorldError, match=r'SMDDP_DEVICE is "tpu", but may hold .*"host"')
    with refused, fresh("A", env={"SMDDP_DEVICE": "tpu"}):
        pass


# ---- a device's first collectives are compared with their known results
#
# That right results pass, and are not counted, test_collectives.py shows: it counts all calls.


GLOO = "fallback:gloo"


def first_gather(ctx: Context) -> None:
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

    first_gather(ctx)
    host_device.calls(ctx, 1)  # it is counted by now
    backend.reset_statistics()
    _C.host_device_reads_peers("wrong" if ctx.rank == 1 else "right")
    reduce_scatter(ctx)
    reduce_scatter(ctx)
    # The device has recovered, but this process trusts the path no more; others it does.
    _C.host_device_reads_peers("right")
    group = dist.new_group()
    reduce_scatter(ctx, group)
    dist.all_reduce(host_empty(1000, torch.float32), group=group)
    return host_device.calls(ctx, 4)


def test_a_wrong_result_leaves_the_path_to_the_fallback_on_all_ranks() -> None:
    with fresh("AAA", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
        for taken in world.run(one_rank_misreads):
            assert taken == {f"reduce_scatter {GLOO}": 3, f"all_reduce {KERNEL}": 1}


PLENTY = 1 << 40


def sums_are_lost(ctx: Context, largest: int, keeps_bytes: bool) -> dict[str, int]:
    """One rank's device does nothing for a sum, in a second group."""
    from deepspeed_smddp import _C
    from deepspeed_smddp.distributed import backend

    second = dist.new_group()
    _C.host_device_memory(PLENTY, keeps_bytes)
    for group in (None, second):
        dist.all_gather_into_tensor(
            host_empty(1000 * ctx.size, torch.float32),
            host_empty(1000, torch.float32),
            group=group,
        )
    reduce_scatter(ctx)
    host_device.calls(ctx, 3)
    backend.reset_statistics()
    _C.host_device_memory(largest if ctx.rank == 1 else PLENTY, keeps_bytes)
    _C.host_device_loses_sums(ctx.rank == 1)
    reduce_scatter(ctx, second)
    return host_device.calls(ctx, 1)


@pytest.mark.parametrize(
    ("largest", "keeps_bytes"), [(PLENTY, True), (1 << 16, False)], ids=["old bytes", "memory"]
)
def test_a_lost_result_is_found_where(largest: int, keeps_bytes: bool) -> None:
    """Memory holds the bytes of an earlier check, or is too short for the whole one."""
    with fresh("AAA", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
        for taken in world.run(sums_are_lost, largest, keeps_bytes):
            assert taken == {f"reduce_scatter {GLOO}": 1}


def stale_reads(ctx: Context) -> dict[str, int]:
    """Memory of peers is right when it is first read, and never changes."""
    from deepspeed_smddp import _C

    reduce_scatter(ctx)
    _C.host_device_reads_peers("stale" if ctx.rank == 1 else "right")
    first_gather(ctx)
    return host_device.calls(ctx, 2)


def test_a_result_of_an_earlier_call_is_found() -> None:
    with fresh("AAA", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
        for taken in world.run(stale_reads):
            assert taken == {f"reduce_scatter {KERNEL}": 1, f"all_gather {GLOO}": 1}


def no_memory(ctx: Context, largest: int) -> dict[str, int]:
    from deepspeed_smddp import _C

    first_gather(ctx)
    tensor = host_empty(1000, torch.float32).fill_(1)
    _C.host_device_memory(largest if ctx.rank == 1 else PLENTY, False)
    dist.all_reduce(tensor)
    assert tensor[999].item() == ctx.size
    return host_device.calls(ctx, 2)


def test_where_no_memory_is_left_for_the_check_the_fallback_is_used() -> None:
    for largest, path in ((1 << 16, KERNEL), (0, GLOO)):
        with fresh("AAA", env={**ENVIRONMENT, "SMDDP_FALLBACK": "warn"}) as world:
            for taken in world.run(no_memory, largest):
                assert taken == {f"all_gather {COPIES}": 1, f"all_reduce {path}": 1}


def test_without_the_check_the_wrong_result_is_returned() -> None:
    # The other ranks wait for the one that has found it.
    env = {**ENVIRONMENT, **debug(check_first_use=0), "SMDDP_TIMEOUT_SECONDS": "3"}
    with fresh("AAA", env=env) as world, pytest.raises(WorldError, match="assert") as raised:
        world.run(one_rank_misreads)
    assert 1 in raised.value.failures


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    on_device(worlds, layout).run(body)
