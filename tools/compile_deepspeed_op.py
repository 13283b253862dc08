#!/usr/bin/env python3
"""Compile the shared-memory operation that DeepSpeed loads on CPUs, into torch's extension cache.

DeepSpeed would compile it when a program makes its first process group (half a minute and more of
silence). A call while the cache holds the operation changes nothing.

tools/compile_deepspeed_op.py [CACHE]    CACHE: a folder that only this call writes to, in place of
                                         the user's cache
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STALE = 600.0  # seconds; a compile takes less than one minute


def remove_stale_locks(cache: Path, age: float) -> list[Path]:
    """Remove what killed compiles left: torch waits without end for the lock of another process.

    ``age``: seconds from which on a lock counts as left. Returns the locks that are left alone, as
    other processes seem to compile.
    """
    held = []
    for lock in cache.glob("**/lock"):
        try:
            if time.time() - lock.stat().st_mtime < age:
                held.append(lock)
                continue
            lock.unlink()
        except FileNotFoundError:  # its process has just finished
            continue
        print(f"removed {lock}: the compile that made it was killed")
    return held


def main(arguments: list[str]) -> None:
    """Compile through DeepSpeed's own builder, as its programs do."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if arguments:
        os.environ["TORCH_EXTENSIONS_DIR"] = arguments[0]
    print("compiling DeepSpeed's shared-memory operation beside the build", flush=True)
    begun = time.monotonic()

    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in remove_stale_locks(cache, 0.0 if arguments else STALE):
        print(f"waiting for the process that compiles; {lock} is its lock")
        print("(if it has been killed: interrupt, and remove that file)", flush=True)
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        builder.load(verbose=False)
    print(f"compiled DeepSpeed's shared-memory operation in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
