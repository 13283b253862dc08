"""Which features apply with the installed DeepSpeed and torch, for ``smddp doctor``.

Imports neither library: it compares versions and the sources on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace

from deepspeed_smddp.diagnose.finding import Finding, Verdict
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
    """One finding with the features that apply, and one for each that does not, with the reason."""
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
