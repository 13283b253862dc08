"""From the first group to the end of the process: init again, exit, fork, interrupts, leaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from harness import growth, programs
from harness.programs import Programs, assert_clean
from harness.training import Trainer
from harness.world import fresh, shared_memory_left

LAYOUTS = ("AA", "AB")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert shared_memory_left() == []


def test_failures_one_after_another_are_told_at_once() -> None:
    """The same sentence each time, as in a restarted job; beyond 1,024 descriptors."""
    program = """
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    open_files = [open("/dev/null") for _ in range(1100)]
    seconds = []
    for turn in range(TURNS):
        join(f"turn {turn}")
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(10, dtype=torch.int32 if rank else torch.float32))
        except RuntimeError as error:
            assert "int32" in str(error), error
        else:
            raise AssertionError("no error")
        seconds.append(time.monotonic() - began)
        dist.destroy_process_group()
    # torch asks the name server for each connection to the store: 5 s if that does not answer.
    assert max(seconds) < 10, seconds
    print("done", max(seconds))
    """
    turns = os.environ.get("TEST_FAILURES", "5")
    ends = programs.run("AB", program.replace("TURNS", turns), limit=20 + 5 * int(turns))
    assert all("done" in end.output for end in ends), ends


# How a program ends without destroying its group, and its exit code.
ENDS = {
    "nothing in flight": (
        """
        join()
        for _ in range(3):
            t = torch.ones(100_000)
            dist.all_reduce(t)
        extra = dist.new_group(list(range(size)))
        dist.all_reduce(t, group=extra)
        dist.broadcast(t, 0)
        """,
        0,
    ),
    "operations that no rank waits for": (
        """
        join()
        t = torch.ones(200_000)
        works = [dist.all_reduce(t * i, async_op=True) for i in range(5)]
        """,
        0,
    ),
    "an operation that no peer joins": (
        """
        join()
        dist.barrier()
        whole, part = torch.empty(100 * size), torch.ones(100)
        if rank == 0:
            work = dist.all_gather_into_tensor(whole, part, async_op=True)
        else:
            time.sleep(1)
        """,
        0,
    ),
    "an exception": (
        """
        join()
        dist.all_reduce(torch.ones(5))
        work = dist.all_reduce(torch.ones(5), async_op=True)
        raise LookupError("the program's own error")
        """,
        1,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_without_destroying_its_group(name: str, layout: str) -> None:
    program, code = ENDS[name]
    # A rank that ends later may report that another one has ended.
    for end in programs.run(layout, program, limit=40, env={"SMDDP_TIMEOUT_SECONDS": "300"}):
        assert end.code == code, end
        assert not code or "the program's own error" in end.errors
        for word in ("terminate called", "Fatal", "Aborted", *([] if code else ["Traceback"])):
            assert word not in end.errors, end.errors


@pytest.mark.rare
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_grows_with_default_groups(layout: str) -> None:
    with fresh(layout, backend=None) as world:
        assert world.run(growth.with_default_groups, "smddp", timeout=220) == [{}] * world.size


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.timeout(600, method="signal")  # at first DeepSpeed compiles an operation
def test_nothing_grows_with_engines(trainer: Trainer) -> None:
    grown = trainer.call("harness.growth:with_engines", "AA", "smddp", limit=250)
    assert grown == [{}] * 2


def test_a_wait_ends_with_the_process() -> None:
    """On a daemon thread, for an operation that rank 1 does not join: ended, not out of time."""
    program = """
    import atexit, threading
    from datetime import timedelta
    join()
    dist.barrier()
    seen = []
    def wait():
        try:
            dist.all_reduce(torch.ones(10), async_op=True).wait(timedelta(seconds=60))
        except RuntimeError as error:
            seen.append(str(error))
    if rank == 0:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.5)
        atexit._run_exitfuncs()
        thread.join(10)
        print(seen)
    else:
        time.sleep(2)
    """
    ends = programs.run("AB", program, limit=30)
    # Which of the two depends on whether the thread wakes before the group has left.
    ending = "the process is ending, with all_reduce #2 under way"
    assert ending in ends[0].output or "ended with operations in flight" in ends[0].output, ends


def test_a_group_may_be_aborted_while_it_ends() -> None:
    program = """
    import threading
    for turn in range(20):
        join(f"turn {turn}")
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        ended = False
        def abort():
            while not ended:
                group.abort()
        dist.all_reduce(torch.ones(10))
        threads = [threading.Thread(target=abort) for _ in range(2)]
        for thread in threads:
            thread.start()
        dist.destroy_process_group()
        ended = True
        for thread in threads:
            thread.join()
    print("done")
    """
    ends = programs.run("AB", program)
    assert_clean(ends)
    assert all("done" in end.output for end in ends)


def test_work_outlives_its_group_and_a_later_operation_raises() -> None:
    program = """
    join()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    t = torch.ones(1000)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    future = work.get_future()
    dist.destroy_process_group()
    import gc; gc.collect()
    assert work.is_completed() and work.wait()
    assert future.done()
    print(t[0].item(), work)
    try:
        backend.allreduce([torch.ones(3)]).wait()
    except (RuntimeError, ValueError) as error:
        print("refused:", error)
    """
    ends = programs.run("AB", program)
    assert_clean(ends)
    assert all("refused: smddp" in end.output for end in ends), ends


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_loader_workers_forked_beside_a_group(layout: str) -> None:
    program = """
    from torch.utils.data import DataLoader, Dataset
    class Numbers(Dataset):
        def __len__(self): return 24
        def __getitem__(self, i): return torch.full((4,), float(i))
    join()
    t = torch.ones(1000)
    dist.all_reduce(t)
    for epoch in range(2):
        seen = 0
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
            work = dist.all_reduce(batch, async_op=True)
            work.wait()
            seen += 1
        assert seen == 6
    dist.barrier()
    dist.destroy_process_group()
    """
    assert_clean(programs.run(layout, program))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forked_child_is_refused_and_its_exit_does_no_harm(layout: str) -> None:
    """A child with a whole interpreter shutdown: destructors of the parent's group run in it."""
    program = """
    join()
    t = torch.ones(1000)
    dist.all_reduce(t)
    work = dist.all_reduce(t, async_op=True) if rank == 0 else None
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(t)
        except Exception as error:
            print("refused:", error, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if rank != 0:
        work = dist.all_reduce(t, async_op=True)
    work.wait()
    for _ in range(20):
        dist.all_reduce(t)
        out = torch.empty(size * 1000)
        dist.all_gather_into_tensor(out, t)
    dist.destroy_process_group()
    """
    ends = programs.run(layout, program)
    assert_clean(ends)
    assert all("refused: smddp" in end.output for end in ends)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interrupt_in_a_wait(layout: str) -> None:
    """Ctrl-C during a wait for a missing peer ends the program soon."""
    program = """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    join()
    dist.barrier()
    print("ready", flush=True)
    if rank == 0:
        dist.all_reduce(torch.ones(10))
    else:
        time.sleep(15)
    """
    job = Programs(layout, program, env={"SMDDP_TIMEOUT_SECONDS": "60"})
    try:
        for rank in range(len(layout)):
            job.wait_for(rank, "ready")
        time.sleep(0.3)
        began = time.monotonic()
        for process in job.processes:
            os.kill(process.pid, signal.SIGINT)
        ends = job.end(limit=8)
        took = time.monotonic() - began
    finally:
        job.kill()
    assert took < 6, f"took {took:.1f} s"
    assert all(end.code is not None for end in ends)
    assert "KeyboardInterrupt" in ends[0].errors, ends[0].errors
    assert "terminate called" not in ends[0].errors
