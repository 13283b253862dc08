"""Operations that smddp does not own go to gloo: they work, are counted, and can be forbidden."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed import Testbed

import ranks
from harness import cases
from harness.cases import Case
from harness.on_layouts import Body, OnLayouts
from harness.worker import Context
from harness.world import Pool, fresh

on = OnLayouts()
PATH = "fallback:gloo"
CALLS = {
    "broadcast": Case("broadcast", asynchronous=False),
    "broadcast of nothing": Case("broadcast", numels=(0,)),
    "async broadcast": Case("broadcast"),
    "all_to_all_single": Case("all_to_all"),
    "all_to_all_single of unequal parts": Case("all_to_all", "unequal"),
    "all_to_all": Case("all_to_all", "list"),
    **{name: Case(name) for name in ("reduce", "gather", "scatter")},
}


def operation(ctx: Context, name: str) -> None:
    """Run one operation and check its result."""
    rank, size = ctx.rank, ctx.size
    mine = torch.full((5,), float(rank))
    if name in CALLS:
        cases.check(ctx, CALLS[name])
    elif name in ("all_reduce of bits", "reduce of bits"):
        for op, wanted in (("BAND", 2), ("BOR", 7), ("BXOR", 6 if size % 2 else 5)):
            bits = torch.full((5,), 6 if rank == 0 else 3, dtype=torch.int32)
            if name.startswith("reduce"):
                dist.reduce(bits, dst=0, op=getattr(dist.ReduceOp, op))
            else:
                dist.all_reduce(bits, op=getattr(dist.ReduceOp, op))
            assert bits[0] == wanted or (rank > 0 and name.startswith("reduce"))
    elif name == "gather_object":
        objects: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object("x" * (rank + 1), objects, dst=0)
        assert objects is None or objects == ["x" * (r + 1) for r in range(size)]
    elif name == "scatter_object_list":
        mine_of: list[Any] = [None]
        dist.scatter_object_list(mine_of, list(range(size)) if rank == 0 else None, src=0)
        assert mine_of == [rank]
    elif name == "batch_isend_irecv":
        got = torch.empty(5)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % size),
                dist.P2POp(dist.irecv, got, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(got, torch.full((5,), float((rank - 1) % size)))
    elif name == "broadcast_object_list":
        values: list[Any] = [{"a": 1}, "two", None] if rank == 0 else [None] * 3
        dist.broadcast_object_list(values, src=0)
        assert values == [{"a": 1}, "two", None]
    elif name == "all_gather_object":
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, "x" * (rank + 1))
        assert gathered == ["x" * (r + 1) for r in range(size)]
    else:
        raise AssertionError(f"no operation {name}")


# The collective of smddp's own that carries out each call.
OWN = {
    **{name: case.collective for name, case in CALLS.items()},
    "broadcast_object_list": "broadcast",
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "scatter_object_list": "scatter",
    "batch_isend_irecv": "send",
}
# The name under which each other operation is counted.
COUNTED = {
    "all_reduce of bits": "all_reduce",
    "reduce of bits": "reduce",
}


def counted(ctx: Context, name: str) -> list[dict[str, Any]]:
    import deepspeed_smddp

    deepspeed_smddp.reset_statistics()
    operation(ctx, name)
    return [dict(row) for row in deepspeed_smddp.statistics()]


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("layout", ["AAA", "AAB"])
def test_fallback_operations_work_and_are_counted(worlds: Pool, layout: str, name: str) -> None:
    expected = COUNTED[name]
    for rows in worlds(layout).run(counted, name):
        fallback = {row["collective"]: row for row in rows if row["path"].startswith("fallback")}
        row = fallback[expected]
        assert row["path"] == PATH
        assert row["calls"] >= 1
        assert row["bytes"] > 0
        assert {"collective", "path", "calls", "bytes", "seconds", "wait_seconds"} <= set(row)


@on("AAA", "AAB")
def a_premultiplied_sum_is_right_or_refused(ctx: Context) -> None:
    """NCCL alone has it: the right result, or a refusal."""
    t = torch.full((5,), 1.0)
    try:
        dist.all_reduce(t, op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0))
    except (RuntimeError, ValueError, NotImplementedError):
        return
    assert torch.equal(t, torch.full((5,), 2.0 * ctx.size))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("layout", ["AAA", "AAB"])
def test_what_smddp_carries_out_itself(worlds: Pool, layout: str, name: str) -> None:
    for rows in worlds(layout).run(counted, name):
        assert not [row for row in rows if row["path"].startswith("fallback")], rows
        assert OWN[name] in {row["collective"] for row in rows if row["calls"]}


def forbidden(ctx: Context, name: str) -> str:
    import deepspeed_smddp

    deepspeed_smddp.configure(fallback="error")
    try:
        operation(ctx, name)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    else:
        message = ""
    cases.check(ctx, Case("all_gather"))  # smddp's own operations still work
    cases.check(ctx, Case("all_reduce"))
    dist.barrier()
    deepspeed_smddp.configure(fallback="warn")
    operation(ctx, name)
    return message


@pytest.mark.parametrize("name", ["all_reduce of bits", "reduce of bits"])
def test_forbidden_fallback_names_the_operation(worlds: Pool, name: str) -> None:
    for message in worlds("AAB").run(forbidden, name):
        assert COUNTED[name] in message and "SUM" in message, message
        assert "fallback" in message and "gloo" in message, message


def repeated(ctx: Context, mode: str) -> None:
    import deepspeed_smddp

    deepspeed_smddp.configure(fallback=mode)
    for _ in range(5):
        operation(ctx, "all_reduce of bits")
        operation(ctx, "reduce of bits")


@pytest.mark.parametrize(("mode", "times"), [("warn", 1), ("silent", 0)])
def test_fallback_warns_once_per_operation_or_never(mode: str, times: int) -> None:
    with fresh("AAB") as world:
        world.run(repeated, mode)
        said = [line for line in world.log(0).splitlines() if "smddp" in line and "gloo" in line]
        for name in ("all_reduce", "reduce"):
            assert len([line for line in said if f" {name} goes to gloo" in line]) == times, said


@on("AAA", "ABC")
def first_operation_of_a_group_is_a_send(ctx: Context) -> None:
    """A send may be the first operation of a group, and does not wait for the third rank."""
    group = dist.new_group([0, 1, 2])
    store = dist.PrefixStore("sent", dist.distributed_c10d._get_default_store())
    if ctx.rank == 0:
        dist.send(torch.ones(3), dst=2, group=group)
    elif ctx.rank == 2:
        got = torch.empty(3)
        dist.recv(got, src=0, group=group)
        assert got.sum() == 3
        store.set("received", "yes")
    else:
        store.wait(["received"])
    cases.check(ctx, Case("all_gather"), group, [0, 1, 2])
    value = torch.full((2,), float(ctx.rank))
    dist.broadcast(value, src=1, group=group)
    assert value[0] == 1
    dist.destroy_process_group(group)


@on("AAA", "AAB")
def own_and_fallback_operations_in_flight_together(ctx: Context) -> None:
    works = []
    tensors = []
    for i in range(10):
        t = torch.full((1000,), float(ctx.rank))
        tensors.append(t)
        if i % 2:
            bits = torch.full((1000,), 7 - i, dtype=torch.int32)
            tensors[-1] = bits
            works.append(dist.all_reduce(bits, op=dist.ReduceOp.BAND, async_op=True))
        else:
            works.append(dist.all_reduce(t, async_op=True))
    for work in reversed(works):
        work.wait()
    for i, t in enumerate(tensors):
        assert t[0] == (7 - i if i % 2 else sum(range(ctx.size)))


@pytest.mark.parametrize(("body", "layout"), on.rows)
def test_on_ranks(worlds: Pool, body: Body, layout: str) -> None:
    worlds(layout).run(body)


# A process whose CPU-only torch says that there is CUDA: sections are opened on GPUs only.
CUDA_HOOKS = """
#include <ATen/detail/CUDAHooksInterface.h>
namespace at::detail {
struct Hooks : CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
};
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail
"""
SECTION = """
import torch, torch.distributed as dist, deepspeed_smddp
dist.init_process_group("smddp", rank=0, world_size=1, store=dist.HashStore())
group, cpu = dist.group.WORLD, torch.device("cpu")
assert group._get_backend(cpu).supports_coalescing, "this torch does not believe in CUDA"
group._start_coalescing(cpu)
output = torch.empty(4)
group._allgather_base(output, torch.ones(4))
group._end_coalescing(cpu).wait()
assert output.tolist() == [1.0] * 4
assert not deepspeed_smddp.fallback_ledger()
dist.destroy_process_group()
"""


def test_a_section_of_smddps_own_operations_needs_no_fallback(tmp_path: Path) -> None:
    source, library = tmp_path / "hooks.cc", tmp_path / "hooks.so"
    source.write_text(CUDA_HOOKS)
    include = Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", "-I", str(include), str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    done = ranks.python(SECTION, SMDDP_FALLBACK="error", LD_PRELOAD=str(library))
    assert done.returncode == 0, done.stderr


def fallback_where_the_name_is_no_address(ctx: Context) -> float:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # before Gloo reads it
    value = torch.full((5,), ctx.rank + 1)
    if ctx.rank == 0:
        dist.send(value, dst=1)
    else:
        dist.recv(value, src=0)
    dist.all_reduce(value, op=dist.ReduceOp.BOR)
    return float(value[0])


@pytest.mark.testbed
def test_the_fallback_takes_the_network_that_smddp_has_chosen(
    testbed: Callable[..., Testbed],
) -> None:
    """Where a host's name is 127.0.1.1, as Debian has it, Gloo would connect to its own host."""
    bed = testbed(hosts=2)  # which have a file /etc/hosts of their own
    names = "127.0.0.1 localhost\n127.0.1.1 host0 host1\n"
    for host in bed.hosts:
        write = ["sh", "-c", 'grep -q host1 /etc/hosts && printf "%s" "$0" > /etc/hosts', names]
        host.run(write, check=True)
    with fresh("AB", env={"SMDDP_TIMEOUT_SECONDS": "20"}, bed=bed) as world:
        assert world.run(fallback_where_the_name_is_no_address) == [1.0, 1.0]
