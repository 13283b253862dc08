"""Says what a start waits for that is blocked outside smddp: a lock, a compilation, other ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from deepspeed_smddp.errors import logger
from deepspeed_smddp.upstream import compile_locks

BLOCKED_SECONDS = 10.0
_LOOKS = 4  # in this time
_said: set[str] = set()


@contextmanager
def watched() -> Iterator[None]:
    """In the context, a thread says once what the caller has waited for so long."""
    caller, ended = threading.get_ident(), threading.Event()

    def look() -> None:
        blocked_by, since = "", 0.0
        while not ended.wait(BLOCKED_SECONDS / _LOOKS):
            found, now = _waits_for(sys._current_frames().get(caller)), time.monotonic()
            if found != blocked_by:
                blocked_by, since = found, now
            elif found and found not in _said and now - since >= BLOCKED_SECONDS:
                _said.add(found)
                logger.warning("smddp: this start waits for %s", found)

    watcher = threading.Thread(target=look, name="smddp-start", daemon=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one of each host
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if watcher.is_alive():
            watcher.join()


def _waits_for(frame: FrameType | None) -> str:
    """What the innermost known function of a thread waits for; empty if there is none."""
    while frame is not None:
        name, held = frame.f_code.co_name, frame.f_locals
        module = frame.f_globals.get("__name__")
        if name == "wait" and "baton" in held and module == compile_locks.__name__:
            return compile_locks.described(held["baton"].lock_file_path)
        if name == "_jit_compile" and module == "torch.utils.cpp_extension":
            return f"the compilation of {held['name']} in {held['build_directory']}"
        if name == "init_process_group" and module == "torch.distributed.distributed_c10d":
            address = [os.environ.get(f"MASTER_{part}", "") for part in ("ADDR", "PORT")]
            where = f", to meet them at {':'.join(address)}" if all(address) else ""
            return f"the other ranks{where}"
        frame = frame.f_back
    return ""
