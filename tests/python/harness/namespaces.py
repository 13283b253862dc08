"""Moves the calling thread to a host of a testbed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_CLONE_FS = 0x200
_libc = ctypes.CDLL(None, use_errno=True)


def enter(holder: int, kinds: Sequence[str]) -> None:
    """Enters these namespaces ("net", "uts", "mnt") of a process."""
    folder = os.getcwd()
    _libc.unshare(_CLONE_FS)  # a thread that shares its folder with another can't enter "mnt"
    for kind in kinds:
        descriptor = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {kind} of {holder}")
        finally:
            os.close(descriptor)
    os.chdir(folder)
