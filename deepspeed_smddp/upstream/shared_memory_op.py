"""DeepSpeed's shared-memory operation for CPU ranks, on machines that cannot compile it.

On CPUs ``init_distributed`` compiles it with g++ and ninja, for DeepSpeed's own inference, and
fails where they are missing. Training does not call it. DeepSpeed reads whether it may be compiled
from a dictionary (``deepspeed.ops.__compatible_ops__``) whose entries stay as they are set.
"""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from typing import Any

from deepspeed_smddp.errors import logger

_BUILDER, _NAME = "ShareMemCommBuilder", "deepspeed_shm_comm"


def leave_out_if_not_compilable() -> None:
    """Makes DeepSpeed go on without the operation, with one line, if it could not compile it.

    Does nothing on a GPU, where a compiled one was installed, or if this DeepSpeed has no such
    dictionary: then ``init_distributed`` does what it does without this package.
    """
    try:
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        installed = import_module("deepspeed.git_version_info").installed_ops.get(_NAME)
        if accelerator.create_op_builder(_BUILDER) is None or installed:
            return
        compatible: Any = import_module("deepspeed.ops").__compatible_ops__
        if not compatible.get(_NAME) or _can_compile():
            return
        compatible[_NAME] = False
    except (ImportError, AttributeError):
        return
    logger.info(
        "smddp: DeepSpeed goes on without its shared-memory operation (for inference on CPUs), as "
        "there is no compiler or no ninja"
    )


def _can_compile() -> bool:
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        return False
    try:
        command = [os.environ.get("CXX", "c++"), "--version"]  # cpp_extension.get_cxx_compiler
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
