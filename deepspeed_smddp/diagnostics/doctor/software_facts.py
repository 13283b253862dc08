"""Versions and hashes of the software of one rank."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import deepspeed_smddp
from deepspeed_smddp.diagnostics.doctor.fact import Fact
from deepspeed_smddp.diagnostics.doctor.finding import Verdict
from deepspeed_smddp.distributed import extension

_DIGITS = 12
_NONE = "none"


def facts() -> Iterator[Fact]:
    """smddp, its files and its compiled module, torch, DeepSpeed, Python, the kernel, libfabric."""
    failed = Verdict.FAILED
    yield Fact("deepspeed-smddp", deepspeed_smddp.__version__, if_different=failed)
    yield Fact("package files", package_hash(), if_different=failed)
    yield Fact("compiled module", _module_hash(), if_different=failed)
    yield Fact("built for torch", extension.built_for_torch() or _NONE, if_different=failed)
    yield Fact("torch", str(torch.__version__), if_different=failed)
    yield Fact("torch build", _torch_build())
    yield Fact("DeepSpeed", _version("deepspeed"), if_different=failed)
    yield Fact("transformers", _version("transformers"))
    yield Fact("Python", platform.python_version())
    yield Fact("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("C library", " ".join(platform.libc_ver()))
    yield Fact("libfabric file", _libfabric_file())


def package_hash(folder: Path | None = None) -> str:
    """A hash of names and contents of the package's Python files."""
    root = folder or Path(deepspeed_smddp.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def file_hash(path: Path) -> str:
    """A hash of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:_DIGITS]


def _module_hash() -> str:
    found = importlib.util.find_spec("deepspeed_smddp._C")
    if found is None or found.origin is None:
        return "not built"
    return file_hash(Path(found.origin))


def _torch_build() -> str:
    version = torch.version
    cuda, hip = version.cuda, getattr(version, "hip", None)
    device = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "CPU only"
    abi = "new" if torch._C._GLIBCXX_USE_CXX11_ABI else "old"
    return f"{device}, commit {str(version.git_version)[:8]}, {abi} C++ ABI"


def _libfabric_file() -> str:
    """The libfabric that this process has loaded, with its hash; "none" if it has none."""
    if "deepspeed_smddp._C" not in sys.modules:
        return _NONE
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith("libfabric"):
            return f"{file_hash(Path(fields[5]))} {fields[5]}"
    return _NONE


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
