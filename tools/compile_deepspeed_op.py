#!/usr/bin/env python3
"""Compile the shared-memory operation that DeepSpeed loads on CPUs, into torch's extension cache.

DeepSpeed would compile it when a program makes its first process group (half a minute and more of
silence). A call while the cache holds the operation changes nothing.
"""

from __future__ import annotations

import os
import time

os.environ["DS_ACCELERATOR"] = "cpu"


def main() -> None:
    """Compile through DeepSpeed's own builder, as its programs do."""
    print("compiling DeepSpeed's shared-memory operation beside the build", flush=True)
    begun = time.monotonic()

    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        builder.load(verbose=False)
    print(f"compiled DeepSpeed's shared-memory operation in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
