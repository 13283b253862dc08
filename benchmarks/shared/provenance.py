"""What was measured, and where: names of the machine, versions, commits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


def versions() -> str:
    """Of the software below all competitors."""
    found = [f"Linux {platform.release()}", f"Python {platform.python_version()}"]
    # In another process: once loaded, libfabric replaces signal handlers, also the one of Ctrl-C.
    library = os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1"
    code = f"import ctypes; print(ctypes.CDLL({library!r}).fi_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        version = int(done.stdout)
        found.append(f"libfabric {version >> 16}.{version & 0xFFFF}")
    return "; ".join(found)


def source_version(tree: Path) -> str:
    """The commit of the tree, with a + if files of the tree differ from it."""
    done = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
