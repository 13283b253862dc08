"""deepspeed_smddp.distributed.memory: tensors that the ranks of a host share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_smddp.distributed import memory
from harness import fsdp, programs
from harness.fsdp import Run
from harness.programs import assert_clean
from harness.world import Pool, fresh, shared_memory_left

KIB, MIB = 1 << 10, 1 << 20


def run_with_allocator(program: str, **env: str) -> str:
    """Runs a new interpreter with large tensors in shared memory; returns its output."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "SMDDP_SHARED_ALLOCATOR": "1", **env}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rror" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    gc.collect()
    memory.trim()


def test_shared_empty() -> None:
    before = memory.statistics()
    t = memory.shared_empty((3, 100_000), torch.bfloat16)
    assert t.shape == (3, 100_000) and t.dtype == torch.bfloat16 and t.is_contiguous()
    assert memory.is_shared(t) and memory.is_shared(t[1, 5:])
    assert memory.shared_empty(7).dtype == torch.get_default_dtype()
    now = memory.statistics()
    assert now["in_use"] - before["in_use"] >= t.nbytes
    assert now["peak"] >= now["in_use"] and now["segments"] >= 1
    t.fill_(2)
    assert t.sum(dtype=torch.float32) == 600_000
    empty = memory.shared_empty((0, 5))
    assert empty.shape == (0, 5) and not memory.is_shared(empty)
    del t
    gc.collect()
    assert memory.statistics()["in_use"] == before["in_use"]
    assert shared_memory_left() == []


def test_mistakes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="negative"):
        memory.shared_empty(-1)
    with pytest.raises(RuntimeError, match="memory"):
        memory.shared_empty(1 << 55)
    with pytest.raises(TypeError, match="a tensor or a module, not list"):
        memory.share_([])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="dense CPU tensors"):
        memory.share_(torch.empty(3, device="meta"))
    with FakeTensorMode(), pytest.raises(ValueError, match="without memory of its own"):
        memory.share_(torch.empty(3))


def test_share_a_tensor_with_its_views() -> None:
    t = torch.arange(1000.0)
    view = t[10:20]
    assert memory.share_(t) is t
    assert memory.is_shared(t) and memory.is_shared(view)
    assert torch.equal(view, torch.arange(10.0, 20.0))
    t[10] = -1
    assert view[0] == -1
    memory.share_(view)  # is there already
    t.resize_(5000)
    assert memory.is_shared(t) and torch.equal(t[11:1000], torch.arange(11.0, 1000.0))


def test_share_memory_that_is_not_torchs() -> None:
    array = torch.arange(100).numpy().copy()
    t = torch.from_numpy(array).view(10, 10).t()
    memory.share_(t)
    assert memory.is_shared(t) and t.stride() == (1, 10)
    assert torch.equal(t, torch.arange(100).view(10, 10).t())
    array[3] = 1000
    assert t[3, 0] == 3


def test_share_a_module_and_train_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    model.add_module("tied", torch.nn.Linear(64, 64))
    model.tied.weight = model[0].weight
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    assert memory.share_(model) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(map(memory.is_shared, [*model.parameters(), *model.buffers()]))
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = last = 0.0
    for step in range(10):
        loss = (model(torch.ones(8, 64)) - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < first
    assert all(map(memory.is_shared, model.parameters()))


GROUP = """
join()
from deepspeed_smddp import memory
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert backend.supports_tensor_alloc(torch.device("cpu"))
assert not backend.supports_tensor_alloc(torch.device("cuda:0"))
out = backend.allocate_tensor(size * 50_000, dtype=torch.float32, device=torch.device("cpu"))
assert out.shape == (size * 50_000,) and memory.is_shared(out)
own = backend.allocate_tensor(50_000, dtype=torch.float32, device=torch.device("cpu"))
own.fill_(rank)
dist.all_gather_into_tensor(out, own)
wanted = torch.arange(size, dtype=torch.float32).repeat_interleave(50_000)
assert torch.equal(out, wanted)
try:
    backend.allocate_tensor(5, dtype=torch.float32, device=torch.device("meta"))
    raise SystemExit("allocated a meta tensor")
except ValueError as error:
    assert "CPU tensors" in str(error)
dist.all_reduce(own)
dist.destroy_process_group()
del backend
assert torch.equal(out, wanted) and (own == sum(range(size))).all()
out.mul_(2)
del out, own
assert memory.statistics()["blocks"] == 0
print("done")
"""


@pytest.mark.parametrize("layout", ["AAA", "AB"])
def test_a_group_allocates(layout: str) -> None:
    ends = programs.run(layout, GROUP)
    assert_clean(ends)
    assert all("done" in end.output for end in ends)
    assert shared_memory_left() == []


def test_collectives_and_death_with_everything_shared() -> None:
    program = """
    join()
    from deepspeed_smddp import memory
    t = torch.full((100_000,), float(rank))
    assert memory.is_shared(t)
    dist.all_reduce(t)
    out = [torch.empty_like(t) for _ in range(size)]
    dist.all_gather(out, t)
    dist.all_reduce(t.to(torch.int32), op=dist.ReduceOp.BAND)  # by the fallback
    assert all((o == sum(range(size))).all() for o in out)
    print("done", flush=True)
    if rank == 0:
        os.kill(os.getpid(), 9)
    dist.destroy_process_group()
    """
    ends = programs.run("AA", program, env={"SMDDP_SHARED_ALLOCATOR": "1"}, imports="")
    assert all("done" in end.output for end in ends), ends
    assert shared_memory_left() == []


def assert_read_in_place(
    got: dict[str, Any], usual: dict[str, Any], ranks: int, hosts: int
) -> None:
    """Bytes from other ranks of the host: read in place, those that each gets by its own rail.

    The results have the bits of those in torch's memory.
    """
    assert (got["losses"], got["norms"]) == (usual["losses"], usual["norms"])
    assert all(map(np.array_equal, got["gradients"], usual["gradients"]))
    rows, others = (
        {row["collective"]: row for row in run["statistics"] if row["collective"] != "all_reduce"}
        for run in (got, usual)
    )
    assert set(rows) == set(others) == {"all_gather", "reduce_scatter"}, "something fell back"
    for collective, row in rows.items():
        peers = ranks // hosts - 1
        assert row["in_place_bytes"] + row["slot_bytes"] == row["bytes"] * hosts * peers // ranks
        # The last piece of a block to be summed may be too small for this path (docs/memory.md).
        small = row["calls"] * hosts * peers * 8 * KIB if collective == "reduce_scatter" else 0
        assert row["slot_bytes"] <= small and row["single_copy_bytes"] == 0, row
        assert others[collective]["in_place_bytes"] == 0
        assert others[collective]["bytes"] == row["bytes"]


@pytest.mark.parametrize("reduce_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["AA", "AABB"])
def test_fsdp2_in_memory_of_the_group(worlds: Pool, layout: str, reduce_dtype: str | None) -> None:
    """By torch's own switch."""
    run = Run(enable=False, dtype="bfloat16" if reduce_dtype else None, reduce_dtype=reduce_dtype)
    ordinary = worlds(layout).run(fsdp.train, run)
    shared = worlds(layout).run(fsdp.train, replace(run, memory="the group"))
    for got, usual in zip(shared, ordinary, strict=True):
        assert_read_in_place(got, usual, len(layout), len(set(layout)))


def test_fsdp2_with_every_tensor_shared(worlds: Pool) -> None:
    run = Run(enable=False, dtype="bfloat16", reduce_dtype="float32")
    wanted = worlds("AA").run(fsdp.train, run)
    with fresh("AA") as world:  # memory.install() can't be undone
        got = world.run(fsdp.train, replace(run, memory="everything"))
    for ours, usual in zip(got, wanted, strict=True):
        assert_read_in_place(ours, usual, 2, 1)


def test_share_an_fsdp2_module(worlds: Pool) -> None:
    """The parameters are DTensors: this rank's part of each moves."""
    run = Run(enable=False)
    wanted = worlds("AA").run(fsdp.train, run)
    for got, usual in zip(
        worlds("AA").run(fsdp.train, replace(run, memory="parameters")), wanted, strict=True
    ):
        assert got["losses"] == usual["losses"]
        assert all(map(np.array_equal, got["gradients"], usual["gradients"]))


def test_every_large_tensor_is_shared_if_asked() -> None:
    program = """
    import gc, io, os, pickle, subprocess, sys, threading
    import numpy, torch
    from deepspeed_smddp import memory

    shared = memory.is_shared
    assert not shared(torch.empty(100)) and shared(torch.empty(16384))
    assert shared(torch.zeros(300, 300)) and shared(torch.randn(200, 200) @ torch.randn(200, 200))
    model = torch.nn.Linear(512, 512)
    assert shared(model.weight) and not shared(model.bias)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for weights_only in (True, False):
        file.seek(0)
        state = torch.load(file, weights_only=weights_only)
        assert torch.equal(state["weight"], model.weight)
    assert torch.equal(pickle.loads(pickle.dumps(model.weight)), model.weight)

    t = torch.arange(50_000.0)
    t.resize_(100_000)
    t.resize_(10)
    t.resize_(200_000)
    assert t[9] == 9
    small = torch.arange(10.0)
    small.resize_(100_000)  # from ordinary to shared
    assert shared(small) and small[9] == 9
    big = torch.arange(100_000.0)
    big.untyped_storage().resize_(40)  # and back
    assert not shared(big)

    array = torch.ones(100_000).numpy()
    assert array.sum() == 100_000
    assert torch.from_numpy(numpy.arange(100_000)).sum() == 4999950000
    t = torch.ones(100_000)
    lazy = torch._lazy_clone(t)
    lazy += 1
    assert t.sum() == 100_000 and lazy.sum() == 200_000
    handed = torch.ones(100_000).share_memory_()
    assert handed.is_shared() and handed.sum() == 100_000
    try:
        torch.ones(100_000).pin_memory()
    except (RuntimeError, AssertionError) as error:
        print("no pinning here:", str(error).splitlines()[0])
    try:
        torch.empty(1 << 50)
        raise SystemExit("a petabyte was granted")
    except RuntimeError as error:
        assert "alloc" in str(error) or "memory" in str(error), error

    with torch.profiler.profile(profile_memory=True) as profile:
        kept = torch.empty(1 << 20)
        del kept
    assert any(e.self_cpu_memory_usage == 4 << 20 for e in profile.events()), "not in the profile"

    def work():
        for _ in range(200):
            a = torch.ones(40_000)
            assert (a + a).sum() == 80_000
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(64, 512)).square().mean().backward()
        optimizer.step()

    child = os.fork()
    if child == 0:
        ok = torch.ones(100_000).sum() == 100_000 and not shared(torch.ones(100_000))
        del t, model
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert subprocess.run([sys.executable, "-c", "print(1)"]).returncode == 0

    peak = memory.statistics()["peak"]
    assert peak > 1 << 20
    del t, lazy, handed, array, small, big, state, model, optimizer, _
    gc.collect()
    memory.trim()
    left = memory.statistics()
    assert left["in_use"] == 0 and left["segments"] == 0, left
    print("done")
    """
    assert "done" in run_with_allocator(program)


def test_the_allocator_without_autoload() -> None:
    program = """
    import torch
    before = torch.ones(100_000)
    from deepspeed_smddp import memory
    assert not memory.is_shared(before) and memory.is_shared(torch.ones(100_000))
    """
    run_with_allocator(program, SMDDP_AUTOLOAD="0")


def test_workers_of_a_data_loader_with_everything_shared() -> None:
    program = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.arange(200_000).view(200, 1000), torch.arange(200))
    for context in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=50, num_workers=2, multiprocessing_context=context)
        if __name__ == "__main__":
            total = sum(x.sum().item() for x, _ in loader)
            assert total == sum(range(200_000)), total
    """
    run_with_allocator(program)


def test_a_wrong_value_gives_a_warning() -> None:
    command = [sys.executable, "-c", "import torch"]
    environment = {**os.environ, "SMDDP_SHARED_ALLOCATOR": "yes"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert 'SMDDP_SHARED_ALLOCATOR is "yes", but may hold true or false' in ended.stderr
