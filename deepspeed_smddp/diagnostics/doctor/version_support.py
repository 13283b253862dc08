"""Which features apply with the installed DeepSpeed and torch, for ``smddp doctor``.

Imports neither library: it compares versions and the sources on disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from deepspeed_smddp.diagnostics.doctor.finding import Finding, Verdict
from deepspeed_smddp.upstream import source, versions

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


def findings() -> Iterator[Finding]:
    """Whether these versions were run, which features apply, and why each other does not."""
    deepspeed, torch = _version("DeepSpeed"), _version("torch")
    if deepspeed is not None and torch is not None:
        yield Finding("trained with", trained(deepspeed, torch, sys.version_info[:2]))
    applying, refused = [], []
    for feature, name in _NAMES.items():
        library = versions.SUPPORT[feature].library
        installed = _version(library)
        if installed is None:
            continue
        reason = refusal(feature, installed)
        if reason is None:
            applying.append(name)
        else:
            refused.append(
                Finding(f"not with this {library}", f"{name}: {reason}", Verdict.LIMITED)
            )
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


def refusal(feature: str, installed: str) -> str | None:
    """Why a feature does not apply with the version that is installed, or None."""
    if feature in source.READ:
        return source.refusal(feature)
    major, minor, *_ = versions.order(installed)
    module = SimpleNamespace(
        __version__=installed, __version_major__=major, __version_minor__=minor
    )
    return versions.refusal(feature, module)


def _version(library: str) -> str | None:
    try:
        return metadata.version(library.lower())
    except metadata.PackageNotFoundError:
        return None
