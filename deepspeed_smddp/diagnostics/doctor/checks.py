"""The checks of ``smddp doctor`` on one process.

Which features apply follows from versions and the sources on disk; neither library is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.fields import PREFIX, Setting, settings_of, show
from deepspeed_smddp.config.parsing import parse_debug
from deepspeed_smddp.config.schema import DEBUG, DebugSettings, ProcessSettings, SmddpConfig
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.diagnostics.doctor.facts import Finding, Verdict, limited
from deepspeed_smddp.distributed import backend, extension
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.process_identity import here
from deepspeed_smddp.upstream import source, versions

# csrc/joining/job_secret.h has the same.
SHORTEST_SECRET = 16
# Features of the tables in ``upstream``, as users know them.
_NAMES = {
    "comm_backend": '"comm_backend" in the config',
    "gather": "gathers without copies",
    "reduce": "reductions without copies",
    "overlap": "reductions during the backward pass on CPUs",
    "bucket sizes": '"auto" bucket sizes',
    "comms log": "comms_logger",
    "monitor": "counters in the monitor",
    "sharded_data_parallel_degree": "sharded_data_parallel_degree",
    "tensor_parallel_degree": "tensor_parallel_degree",
    "split_group": "device meshes on a group that is bound to a GPU",
    "fsdp backward": "FSDP2's reductions during the backward pass on CPUs",
}
# Reads 8 bytes of its parent's memory: the same ptrace rules apply between the ranks of a host.
_READ_PARENT = """
import ctypes, os, struct, sys
here, count = ctypes.create_string_buffer(8), ctypes.c_ulong
local, remote = (struct.pack("PN", at, 8) for at in (ctypes.addressof(here), int(sys.argv[2])))
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
got = read(int(sys.argv[1]), local, count(1), remote, count(1), count(0))
sys.exit(None if got == 8 else os.strerror(ctypes.get_errno()))
"""
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True)
class SettingRow:
    """One setting that applies, and its source."""

    name: str
    value: str
    source: str
    meaning: str


def findings() -> Iterator[Finding]:
    """What versions allow, the extension, libfabric, GPUs, single-copy reads, the host."""
    yield from version_findings()
    try:
        extension.load()
    except ImportError as error:
        yield Finding("extension", str(error), Verdict.FAILED)
    else:
        yield Finding("extension", "loads")
        yield from _fabric()
        yield from gpu_findings()
    if names := backend.ineffective_variables():
        yield limited("TORCH_NCCL_*", f"{', '.join(names)}: {backend.INEFFECTIVE}")
    yield _job_secret()
    yield _single_copy()
    yield Finding("host identity", host_identity())


def setting_rows(ds_config: Any = None) -> list[SettingRow]:
    """Every setting with its value and source; ``ds_config`` is a DeepSpeed config in any form.

    Raises:
        SmddpConfigError: the config or an environment variable holds a wrong value.
    """
    request = comm_backend.parse(ds_config)
    resolved = settings.resolve(request.section)
    rows = []
    if ds_config is not None:
        elements = "elements of output that one AllGather on the wire carries at most"
        for name, held, meaning in (
            (comm_backend.KEY, request.backend, "backend of the default process group"),
            (settings.ZERO_BUCKET, request.zero_allgather_elements, elements),
        ):
            origin = settings.DS_CONFIG if held else settings.DEFAULT
            rows.append(SettingRow(name, str(held or "not set"), origin, meaning))
    for one in settings_of(SmddpConfig):
        value: Any = resolved.section
        for part in one.path.split("."):
            value = getattr(value, part)
        rows.append(_row(one.path, value, resolved.source(one.path), one))
        name = "DEEPSPEED_TIMEOUT"
        if one.path == "timeout_seconds" and (given := os.environ.get(name)):
            applies = rows[-1].source == settings.DEFAULT
            does = "applies to the groups that it makes"
            effect = does if applies else "timeout_seconds has precedence"
            meaning = f"minutes that DeepSpeed asks torch for; {effect}"
            rows.append(SettingRow(name, given, name, meaning))
    for one in settings_of(ProcessSettings):
        name = one.variable or ""
        source = name if one.path in vars(resolved.process) else settings.DEFAULT
        rows.append(_row(name, getattr(resolved.process, one.path), source, one))
    for one in settings_of(DebugSettings):
        if one.path in vars(resolved.debug):
            rows.append(_row(one.path, getattr(resolved.debug, one.path), DEBUG, one))
    return rows


def _row(name: str, value: Any, source: str, one: Setting) -> SettingRow:
    shown = "set" if one.field.secret and value else show(value).strip('"')
    return SettingRow(name, shown or "-", source, one.field.meaning)


def host_identity() -> str:
    """The text that ranks compare to know if they share memory (csrc/topology/topology.cc)."""
    try:
        return os.environ.get(PREFIX + "HOST_ID") or f"{socket.gethostname()}/{here()}"
    except OSError:
        return f"{socket.gethostname()}//"


def _fabric() -> Iterator[Finding]:
    try:
        description = extension.core.fabric_description()
    except RuntimeError as error:
        yield limited("libfabric", f"{error} (groups on one host work)")
        return
    yield Finding("libfabric", description)
    yield from slow_small_messages(description)


def slow_small_messages(description: str) -> Iterator[Finding]:
    """A finding of "tcp;ofi_rxm on eth0 (192.0.2.2), libfabric 1.17 (/usr/...)", else none."""
    if description.startswith("tcp;ofi_rxm ") and ", libfabric 1." in description:
        yield limited(
            "small messages",
            "slow between hosts over this libfabric's tcp;ofi_rxm; "
            "`pip install deepspeed-smddp[fabric]` brings libfabric 2.x, whose tcp is faster",
        )


def _job_secret() -> Finding:
    name = "job secret"
    path = os.environ.get(PREFIX + "JOB_SECRET_FILE", "")
    if path:
        try:
            size = len(Path(path).read_bytes().rstrip(b" \t\r\n"))
        except OSError as error:
            return Finding(name, f"{path} can't be read: {error.strerror}", Verdict.FAILED)
        origin = f"from {path}"
    else:
        size = len(os.environ.get(PREFIX + "JOB_SECRET", ""))
        origin = f"from {PREFIX}JOB_SECRET"
    if size == 0 and not path:
        return Finding(name, "random for each group, handed out through the store")
    if size < SHORTEST_SECRET:
        wanted = f"{origin}: {size} characters, at least {SHORTEST_SECRET} are needed"
        return Finding(name, wanted, Verdict.FAILED)
    return Finding(name, origin)


def _single_copy() -> Finding:
    name = "single-copy reads"
    if parse_debug(os.environ.get(DEBUG, "")).single_copy == "0":
        return limited(name, f"switched off by {DEBUG}=single_copy=0")
    source = ctypes.create_string_buffer(b"8 bytes!", 8)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    process, address = str(os.getpid()), str(ctypes.addressof(source))
    try:
        child = subprocess.run(
            [sys.executable, "-S", "-E", "-c", _READ_PARENT, process, address],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        reason = "" if child.returncode == 0 else child.stderr.strip() or "the probe failed"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if not reason:
        return Finding(name, "allowed; used where a job's first group finds them faster than slots")
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = yama.read_text(encoding="ascii").strip() if yama.exists() else "missing"
    return limited(
        name,
        f"refused by the kernel ({reason}; kernel.yama.ptrace_scope is {scope}); ranks of one host "
        "copy through shared memory instead",
    )


def gpu_findings() -> Iterator[Finding]:
    """Driver, GPUs, peer access, kernels, and what carries CUDA tensors."""
    try:
        report = extension.core.cuda_report()
    except RuntimeError as error:
        # On a machine without a GPU that is no fault; if there is one, torch knows it too.
        missed = torch.cuda.is_available()
        text = f"{error}" if missed else f"none in use ({error}); CPU tensors need none"
        yield Finding("GPUs", text, Verdict.LIMITED if missed else Verdict.OK)
        return
    names = report["devices"]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield Finding("GPUs", f"{listed or 'none visible'}; driver for CUDA {report['version']}")
    if report["apart"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in report["apart"])
        yield limited(
            "GPU peer access",
            f"missing between {pairs} (`nvidia-smi topo -p2p r` shows it): set {PREFIX}DEVICE=off "
            "for groups that contain such a pair; NCCL then carries their CUDA tensors",
        )
    elif len(names) > 1:
        yield Finding("GPU peer access", "between all GPUs")
    kernels = extension.core.device_statistics()["kernels"]
    more = "not built in: build again on a machine with nvcc, or set reduce_on to cpu"
    yield Finding("GPU kernels", "built in") if kernels else limited("GPU kernels", more)
    yield _gpu_way(kernels)


def _gpu_way(kernels: bool) -> Finding:
    name = "CUDA tensors"
    device = os.environ.get(PREFIX + "DEVICE") or "auto"
    if device != "auto":
        return limited(name, f"carried by NCCL: {PREFIX}DEVICE is {device}; unset it")
    if not torch.cuda.is_available():
        return limited(
            name,
            "none: this torch has no CUDA, or sees no GPU; install a CUDA build of torch, and "
            "check CUDA_VISIBLE_DEVICES",
        )
    try:
        on_cpu = settings.current().section.reduce_on == "cpu"
    except SmddpConfigError:  # the table of settings reports it
        on_cpu = False
    if not kernels and not on_cpu:
        return limited(name, "carried by NCCL, as there are no kernels")
    sums = "the CPU, through pinned memory" if on_cpu else "a kernel"
    return Finding(
        name,
        f"gathered by copy engines, summed by {sums}; between hosts through pinned memory "
        "(not yet run on hardware)",
    )


def version_findings() -> Iterator[Finding]:
    """Whether these versions were run, which features apply, and why each other does not."""
    deepspeed, torch = versions.version("DeepSpeed"), versions.version("torch")
    if deepspeed is not None and torch is not None:
        yield Finding("trained with", trained(deepspeed, torch, sys.version_info[:2]))
    applying, refused = [], []
    for feature, name in _NAMES.items():
        library = versions.SUPPORT[feature].library
        if versions.version(library) is None:
            continue
        reason = source.refusal(feature)
        if reason is None:
            applying.append(name)
        else:
            refused.append(limited(f"not with this {library}", f"{name}: {reason}"))
    yield Finding("features that apply", "; ".join(applying) or "none")
    yield from refused


def trained(deepspeed: str, torch: str, python: tuple[int, int]) -> str:
    """Whether the versions are in the table of docs/versions.md, alone or together.

    ``trained_versions.json`` is written with that table, from the results of its run.
    """
    table = json.loads(Path(__file__).with_name("trained_versions.json").read_text("utf-8"))
    ours = (deepspeed, torch, ".".join(map(str, python)))
    # A build for CPUs has the version 2.13.0+cpu.
    versions_ = [version.partition("+")[0] for version in ours]
    names = [
        f"{library} {version}"
        for library, version in zip(("DeepSpeed", "torch", "Python"), ours, strict=True)
    ]
    if versions_ in table:
        return f"{', '.join(names)}: losses of ZeRO-3 over smddp equal to Gloo's"
    known = [any(row[i] == versions_[i] for row in table) for i in range(3)]
    unknown = [name for name, is_known in zip(names, known, strict=True) if not is_known]
    if unknown:
        return f"not {' and '.join(unknown)}; docs/versions.md lists what was"
    return f"each of {', '.join(names)}, but not all together; docs/versions.md lists what was"
