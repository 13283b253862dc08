"""Tells a process from a later one with the same number, for notes that outlive it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def here() -> str:
    """Where numbers of processes mean the same: a boot of a host, and a namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def started(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if it has ended."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
