"""What this machine has: GPUs, compiler, libraries. Needs Python alone; torch is optional."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "gpu-bundle"
CUDA_BIN = Path("/usr/local/cuda/bin")


def no_gpu() -> str | None:
    """The sentence that says why no GPU can be used here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"no GPU check without torch: {sys.executable} can't import it ({error})"
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} of {sys.executable} is built without CUDA"
    return f"no GPU: torch.cuda.is_available() is false (torch {torch.__version__})"


def gpu_count() -> int:
    """The GPUs that torch can use."""
    if no_gpu() is not None:
        return 0
    import torch

    return torch.cuda.device_count()


def tool(name: str) -> str | None:
    """The path of one of CUDA's programs, on the PATH or where CUDA is installed by default."""
    found = shutil.which(name)
    if found is None and (CUDA_BIN / name).is_file():
        found = str(CUDA_BIN / name)
    return found


def libfabric() -> dict[str, str]:
    """The environment that lets libfabric be found: the system's own, else the bundle's."""
    if "SMDDP_LIBFABRIC" in os.environ:
        return {}
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError:
        carried = BUNDLE / "lib" / "libfabric.so.1"
        if carried.is_file():
            return {"SMDDP_LIBFABRIC": str(carried), "FI_PROVIDER_PATH": str(carried.parent)}
    return {}


@cache
def source() -> str:
    """The commit of this tree, with a + if files were changed; without git, the bundle's."""
    if (ROOT / ".git").exists():
        found = _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"])
        if found:
            return found
    stored = BUNDLE / "SOURCE_VERSION"
    return stored.read_text().strip() if stored.is_file() else "unknown"


def facts() -> dict[str, Any]:
    """What a reader of the report needs to know of the machine."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "source": source(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        "compute-sanitizer": tool("compute-sanitizer") or "none",
        "libfabric": {**os.environ, **libfabric()}.get("SMDDP_LIBFABRIC", "the system's"),
    }
    nvcc = tool("nvcc")
    found["nvcc"] = _output([nvcc, "--version"]).splitlines()[-1] if nvcc else "none"
    try:
        import torch
    except ImportError as error:
        return {**found, "torch": f"none ({error})"}
    found["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}"
    if no_gpu() is None:
        found |= _gpu_facts(torch)
    return found


def _gpu_facts(torch: Any) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = torch.cuda.mem_get_info(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current"]
    return {
        "GPUs": ", ".join(sorted({f"{names.count(name)} x {name}" for name in names})),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "memory of GPU 0": f"{memory[0] >> 20} of {memory[1] >> 20} MiB free",
        "driver, compute mode, MIG": _output([*query, "--format=csv,noheader"]) or "unknown",
        "topology": _output(["nvidia-smi", "topo", "-m"]) if len(names) > 1 else "one GPU",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else "none",
    }


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
