"""Collects all that one rank knows about itself for ``smddp doctor``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import deepspeed_smddp
from deepspeed_smddp.config.fields import PREFIX
from deepspeed_smddp.diagnostics.doctor import checks, config_check, machine
from deepspeed_smddp.diagnostics.doctor.facts import Fact, Finding, RankFacts, Verdict, limited
from deepspeed_smddp.distributed import extension, launchers
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.upstream import versions

# Variables of other libraries that change how ranks communicate or compute.
_FOREIGN = ("FI_", "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "OMP_", "KMP_", "DS_", "PYTORCH_")
# What hosts have of their own.
_OF_HOST = ("SMDDP_HOST_ID", "SMDDP_FABRIC_INTERFACE")
_HIDDEN = ("SECRET", "TOKEN", "PASSWORD", "KEY")
# "tcp;ofi_rxm on eth0 (192.0.2.2), libfabric 1.17": hosts differ in names and addresses of NICs.
_ADDRESSES = re.compile(r" on .*?(?=, libfabric)")
_DIGITS = 12
_NONE = "none"


def software_facts() -> Iterator[Fact]:
    """smddp, its files and its compiled module, torch, DeepSpeed, Python, the kernel, libfabric."""
    failed = Verdict.FAILED
    yield Fact("deepspeed-smddp", deepspeed_smddp.__version__, if_different=failed)
    yield Fact("package files", package_hash(), if_different=failed)
    yield Fact("compiled module", _module_hash(), if_different=failed)
    yield Fact("built for torch", extension.built_for_torch() or _NONE, if_different=failed)
    yield Fact("torch", str(torch.__version__), if_different=failed)
    yield Fact("torch build", _torch_build())
    yield Fact("DeepSpeed", versions.version("DeepSpeed") or "not installed", if_different=failed)
    yield Fact("transformers", versions.version("transformers") or "not installed")
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
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]


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


def collect(rank: int, ds_config: Path | None, nonce: str) -> RankFacts:
    """The facts of this process; a part that fails becomes a problem and stops no other part.

    Secrets are compared by a hash with ``nonce``, the same on all ranks of this run.
    """
    host_id = checks.host_identity()
    own = RankFacts(rank, launchers.host_name(), host_id, int(os.environ.get("LOCAL_RANK") or 0))
    _extend(own, "findings", _findings)
    for part in (software_facts, machine.machine_facts, machine.network_facts, _variables):
        _extend(own, part.__module__.rpartition(".")[2], part)
    _extend(own, "settings", lambda: _settings(ds_config, nonce))
    if ds_config is not None:
        _extend(own, "config", lambda: config_check.config_findings(ds_config))
    _extend(own, "limits", machine.machine_findings)
    _extend(own, "networks", lambda: machine.network_findings(own.value("libfabric")))
    return own


def _extend(own: RankFacts, name: str, part: Callable[[], Iterator[Fact | Finding]]) -> None:
    try:
        for found in part():
            if isinstance(found, Fact):
                own.facts.append(found)
            elif found.verdict is not Verdict.OK:
                own.problems.append(found)
    except SmddpConfigError as error:
        own.problems.append(Finding(name, str(error), Verdict.FAILED))
    except Exception as error:  # a fact that can't be read must not hide the others
        text = f"could not be read: {type(error).__name__}: {error}"
        own.problems.append(limited(name, text))


def _findings() -> Iterator[Fact | Finding]:
    for finding in checks.findings():
        if finding.verdict is not Verdict.OK:
            yield finding
        elif finding.name != "host identity":
            yield Fact(finding.name, _ADDRESSES.sub("", finding.text))


def _settings(ds_config: Path | None, nonce: str) -> Iterator[Fact]:
    for row in checks.setting_rows(ds_config):
        secret = os.environ.get(row.name, "") if row.name.startswith(PREFIX) else ""
        value, failing = row.value, Verdict.LIMITED
        if "SECRET" in row.name:
            failing = Verdict.FAILED
            if value == "set":
                value = f"set, {hashlib.sha256(f'{nonce}{secret}'.encode()).hexdigest()[:8]}"
        scope = "host" if row.name in _OF_HOST else "job"
        yield Fact(row.name, value, scope, failing, row.source)  # type: ignore[arg-type]


def _variables() -> Iterator[Fact]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_FOREIGN) and not any(word in name for word in _HIDDEN):
            yield Fact(name, value, detail="environment")
