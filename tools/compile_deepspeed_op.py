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


def remove_stale_locks(cache: Path, age: float) -> None:
    """Remove what killed compiles left: torch waits without end for the lock of another process.

    ``age``: seconds from which on a lock counts as left.
    """
    for lock in cache.glob("**/lock"):
        held = time.time() - lock.stat().st_mtime
        if held >= age:
            print(f"removing {lock}: the compile that made it was killed")
            lock.unlink(missing_ok=True)
        else:
            print(f"waiting for the process that has held {lock} for {held:.0f} s")
            print("(if it has been killed: interrupt, and remove that file)", flush=True)


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
    remove_stale_locks(cache, 0.0 if arguments else STALE)
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        builder.load(verbose=False)
    print(f"compiled DeepSpeed's shared-memory operation in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
