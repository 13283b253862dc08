"""The findings of ``smddp doctor`` about GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from deepspeed_smddp.config import settings
from deepspeed_smddp.config.variables import PREFIX
from deepspeed_smddp.diagnostics.doctor.finding import Finding, Verdict
from deepspeed_smddp.errors import SmddpConfigError


def findings() -> Iterator[Finding]:
    """Driver, GPUs, peer access, kernels, and what carries CUDA tensors."""
    from deepspeed_smddp import _C

    try:
        report = _C.cuda_report()
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
        yield Finding(
            "GPU peer access",
            f"missing between {pairs} (`nvidia-smi topo -p2p r` shows it): set {PREFIX}DEVICE=off "
            "for groups that contain such a pair; NCCL then carries their CUDA tensors",
            Verdict.LIMITED,
        )
    elif len(names) > 1:
        yield Finding("GPU peer access", "between all GPUs")
    kernels = _C.device_statistics()["kernels"]
    yield Finding(
        "GPU kernels",
        "built in"
        if kernels
        else "not built in: build again on a machine with nvcc, or set reduce_on to cpu",
        Verdict.OK if kernels else Verdict.LIMITED,
    )
    yield Finding(
        "GDRCopy",
        f"version {report['gdrcopy']}: flags between hosts lie in GPU memory"
        if report["gdrcopy"][0].isdigit()
        else f"not used ({report['gdrcopy']}); flags between hosts lie in pinned host memory",
    )
    yield _way(kernels)


def _way(kernels: bool) -> Finding:
    name = "CUDA tensors"
    device = os.environ.get(PREFIX + "DEVICE") or "auto"
    if device != "auto":
        return Finding(
            name, f"carried by NCCL: {PREFIX}DEVICE is {device}; unset it", Verdict.LIMITED
        )
    if not torch.cuda.is_available():
        return Finding(
            name,
            "none: this torch has no CUDA, or sees no GPU; install a CUDA build of torch, and "
            "check CUDA_VISIBLE_DEVICES",
            Verdict.LIMITED,
        )
    try:
        on_cpu = settings.current().section.reduce_on == "cpu"
    except SmddpConfigError:  # the table of settings reports it
        on_cpu = False
    if not kernels and not on_cpu:
        return Finding(name, "carried by NCCL, as there are no kernels", Verdict.LIMITED)
    sums = "the CPU, through pinned memory" if on_cpu else "a kernel"
    return Finding(
        name,
        f"gathered by copy engines, summed by {sums}; between hosts through pinned memory "
        "(not yet run on hardware)",
    )
