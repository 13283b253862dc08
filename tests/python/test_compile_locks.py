"""A lock of a compilation that was killed holds no later start up, and a blocked start says so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

from deepspeed_smddp.commands import report
from deepspeed_smddp.deepspeed import start_up
from deepspeed_smddp.diagnostics.report.dump import DumpError
from deepspeed_smddp.errors import logger
from deepspeed_smddp.upstream import compile_locks
from harness.worker import Context
from harness.world import World

HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
from deepspeed_smddp.upstream import compile_locks
compile_locks.install()
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """A process that holds ``lock`` in a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")],
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.fixture
def baton(tmp_path: Path) -> FileBaton:
    return FileBaton(str(tmp_path / "lock"))


def acquired(baton: FileBaton) -> bool:
    return compile_locks.try_acquire(FileBaton.try_acquire, baton)


def test_the_lock_of_a_killed_process_is_removed(
    holder: Any, baton: FileBaton, caplog: pytest.LogCaptureFixture
) -> None:
    assert not acquired(baton)
    holder.kill()
    with pytest.raises(RuntimeError, match="has ended before it was complete"):
        compile_locks.wait(FileBaton.wait, baton)
    assert f"process {holder.pid}, which made it, has ended" in caplog.text
    assert acquired(baton)
    assert not acquired(FileBaton(baton.lock_file_path)), "this process holds it"
    baton.release()
    compile_locks.wait(FileBaton.wait, baton)


def test_a_lock_that_says_nothing_is_removed_once_no_build_can_take_so_long(
    tmp_path: Path, baton: FileBaton
) -> None:
    lock, folder = tmp_path / "lock", tmp_path
    lock.touch()
    assert not acquired(baton)
    then = time.time() - compile_locks.BUILD_SECONDS - 1
    for path in (lock, folder):
        os.utime(path, (then, then))
    with lock.open():
        assert not acquired(baton)
    assert acquired(baton)


def test_a_blocked_start_says_what_it_waits_for(
    holder: Any,
    baton: FileBaton,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_up, "BLOCKED_SECONDS", 0.2)
    with start_up.watched():
        end = time.monotonic() + 0.6
        # Ends the wait, which otherwise lasts as long as the holder lives.
        monkeypatch.setattr(compile_locks.time, "sleep", lambda _: end > time.monotonic() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compile_locks.wait(FileBaton.wait, baton)
    said = f"{baton.lock_file_path} (process {holder.pid} compiles there)"
    assert [said in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(DumpError, match=r"has no group of smddp yet\. It may wait for the lock"):
        report.of_job(str(holder.pid))


def start_alone(ctx: Context) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    start_up.BLOCKED_SECONDS = 0.2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError):
        dist.init_process_group("smddp", store=store, rank=0, world_size=2)
    return said


def test_a_start_without_the_other_ranks_says_so() -> None:
    with closing(World("A", None, {"SMDDP_TIMEOUT_SECONDS": "1"})) as world:
        (said,) = world.run(start_alone)
    assert sum("this start waits for the other ranks, to meet" in line for line in said) == 1
