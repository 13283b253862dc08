"""Locks of torch's compilations: whose one is, and which are left of a process that was killed.

torch compiles an extension, such as DeepSpeed's operations, while it holds a file ``lock`` in the
folder of the build (``torch.utils.file_baton``), and waits for ever while another process does. In
a process that has chosen smddp the file says which process holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_smddp.errors import logger
from deepspeed_smddp.process_identity import here, started
from deepspeed_smddp.upstream import wrapping

# A lock that does not say whose it is, of a process without smddp, is left if no process of this
# host has it open and the build has written nothing for so long.
BUILD_SECONDS = 1800.0


def install() -> None:
    """From now on this process removes locks that are left, and its own say whose they are."""
    from torch.utils.file_baton import FileBaton

    wrapping.wrap(FileBaton, "try_acquire", try_acquire)
    wrapping.wrap(FileBaton, "wait", wait)


def try_acquire(original: Callable[[Any], bool], baton: Any) -> bool:
    """Around ``FileBaton.try_acquire``."""
    path = baton.lock_file_path
    taken = original(baton)
    if not taken and (_removed(path) or not os.path.exists(path)):
        taken = original(baton)
    if taken:
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{here()} {os.getpid()} {started(os.getpid())}", "utf-8")
    return taken


def wait(original: Callable[[Any], None], baton: Any) -> None:
    """In place of ``FileBaton.wait``: until the lock is gone.

    Raises:
        RuntimeError: the process that held it was killed.
    """
    path = baton.lock_file_path
    while os.path.exists(path):
        if _removed(path):
            raise RuntimeError(
                f"smddp: the process that compiled in {os.path.dirname(path)} has ended before it "
                "was complete; start the job again"
            )
        time.sleep(baton.wait_seconds)


def described(path: str) -> str:
    """A lock and what is known of it, for a sentence."""
    where, pid, _ = _holder(path)
    if where == here():
        whose = f"process {pid} compiles there"
    elif where:
        whose = "a process of another host or container compiles there"
    else:
        whose = "it does not say whose it is: delete it if no process compiles there"
    return f"the lock of a compilation, {path} ({why_left(path) or whose})"


def why_left(path: str) -> str | None:
    """Why no process compiles under a lock; None if one may, or there is no lock."""
    where, pid, began = _holder(path)
    if where == here():
        return None if started(int(pid)) == began else f"process {pid}, which made it, has ended"
    with contextlib.suppress(OSError):
        folder = os.path.dirname(path)
        files = [folder, *(entry.path for entry in os.scandir(folder))]
        age = time.time() - max(os.stat(file).st_mtime for file in files)
        if os.path.exists(path) and age > BUILD_SECONDS and not _is_open(path):
            return f"no process has it open, and nothing was written for {age / 60:.0f} minutes"
    return None


def _removed(path: str) -> bool:
    """Whether the lock was left; then it is removed, with a line."""
    try:
        with contextlib.ExitStack() as on_return:
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            on_return.callback(os.close, folder)
            with contextlib.suppress(OSError):
                # One process after the other looks: the lock that the next one sees is another one.
                fcntl.flock(folder, fcntl.LOCK_EX)
            reason = why_left(path)
            if reason is None:
                return False
            os.remove(path)
    except OSError:
        return False
    logger.warning("smddp: removed the lock of a compilation, %s: %s", path, reason)
    return True


def _holder(path: str) -> tuple[str, str, str]:
    """Where the holder of a lock runs, its number and its start; empty if the lock does not say."""
    with contextlib.suppress(OSError, ValueError):
        where, pid, began = Path(path).read_text("utf-8").rsplit(" ", 2)
        return where, pid, began
    return "", "", ""


def _is_open(path: str) -> bool:
    """Whether a process of this host, of those that may be asked, has a file open."""
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samefile(link, path):
                return True
    return False
