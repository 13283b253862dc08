"""A rank that is killed: the others hear of it, no stream stays blocked, nothing is saved."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_check import place
from gpu_check.ranks import world
from gpu_check.step import Run
from harness.variables import debug
from harness.worker import Context, Failure

BOUND = 15.0  # seconds from the call of the survivors to their errors


def death(run: Run) -> None:
    """Before its call, and after it with its stream busy; on one host and on two."""
    for layout in ("AAA", "AABB"):
        for called in (False, True):
            if called and run.small:
                continue  # the simulated device has no stream of the caller's to keep busy
            seconds = one_death(run, layout, called)
            when = "after its call, its stream busy" if called else "before its call"
            run.note(f"{layout}: killed {when}", f"all raised after {max(seconds):.1f} s")


def one_death(run: Run, layout: str, called: bool) -> list[float]:
    """Seconds until each survivor raised an error that names the last rank."""
    last = len(layout) - 1
    survivors = list(range(last))
    # Between hosts wait() returns before the other hosts have called, and the process would end.
    released = int(called or len(set(layout)) > 1)
    with world(run, layout, **debug(release_streams=released)) as ranks:
        ranks.run(call)
        if called:
            ranks.submit(call, True)
            time.sleep(2.0)  # the others wait for this rank's stream, which is busy for longer
            ranks.signal(last, signal.SIGKILL)
        else:
            ranks.signal(last, signal.SIGKILL)
            ranks.submit_to(survivors, call)
        killed = time.monotonic()
        seconds = []
        for rank in survivors:
            outcome = ranks.outcomes([rank], timeout=60)[rank]
            seconds.append(time.monotonic() - killed)
            assert isinstance(outcome, Failure), f"rank {rank} got {outcome}, no error"
            assert f"rank {last}" in outcome.message, f"rank {rank}: {outcome.message}"
        assert max(seconds) < BOUND, f"{layout}: errors came after {seconds} s"
        ranks.submit_to(survivors, streams_run)
        after = ranks.outcomes(survivors, timeout=30)
        assert all(after[rank] is True for rank in survivors), f"after the errors: {after}"
        return seconds


def save(run: Run) -> None:
    """A rank is killed whose data the others' streams wait for, before they save a result of it.

    Their processes end, with nothing saved; if streams are released, they save what is no result.
    """
    for layout in ("AAA", "AABB"):
        for released in (False, True):
            last = len(layout) - 1
            folder = Path(tempfile.mkdtemp(dir=run.folder))
            with world(run, layout, **debug(release_streams=int(released))) as ranks:
                ranks.run(call)
                ranks.submit(compute_and_save, str(folder))
                time.sleep(2.0)
                ranks.signal(last, signal.SIGKILL)
                killed = time.monotonic()
                if released:
                    ranks.outcomes(list(range(last)), timeout=60)
                else:
                    ended = [ranks.exit_status(rank, BOUND) for rank in range(last)]
                    assert ended == [-signal.SIGABRT] * last, f"exit statuses {ended}"
                seconds = time.monotonic() - killed
            saved = sorted(path.name for path in folder.iterdir())
            shutil.rmtree(folder)
            assert bool(saved) == released, f"{layout}, released {released}: {saved}"
            said = "saved what is no result" if released else "processes ended, nothing was saved"
            name = f"{layout}, {'released' if released else 'as by default'}"
            run.note(name, f"{said}, {seconds:.1f} s after the kill")


def compute_and_save(ctx: Context, folder: str) -> None:
    """Saves what it has computed of an AllGather; the last rank's part comes too late."""
    here = place.here()
    part, whole = here.empty(1 << 16), here.empty(ctx.size << 16)
    part.fill_(ctx.rank + 1)
    here.synchronize()
    if ctx.rank == ctx.size - 1:
        here.busy(30.0)
    place.gather(whole, part).wait()
    total = (2 * whole.float()).sum()
    torch.save(total.cpu(), Path(folder) / f"rank{ctx.rank}")  # cpu() waits for the stream


def call(ctx: Context, busy: bool = False) -> bool:
    """An AllGather, and a look at its result; the last rank's stream may be busy before it."""
    here = place.here()
    part, whole = here.empty(1 << 16), here.empty(ctx.size << 16)
    part.fill_(ctx.rank + 1)
    here.synchronize()
    if busy and ctx.rank == ctx.size - 1:
        here.busy(30.0)
    work: Any = place.gather(whole, part)
    work.wait()
    here.synchronize()
    right = whole.view(ctx.size, -1)[:, -1].tolist() == list(range(1, ctx.size + 1))
    if busy or not right:
        place.reduce(part).wait()  # a failure that came after wait() is raised by the next call
    return right


def streams_run(ctx: Context) -> bool:
    """Whether this rank can still use its device, and can end the failed group."""
    here = place.here()
    ones = here.empty(1000).fill_(1)
    here.synchronize()
    right = bool(ones.sum().item() == 1000)
    dist.destroy_process_group()
    return right
