"""Which versions of DeepSpeed and torch each feature supports.

One table for the package. A feature that rests on more of another library supports fewer of its
versions.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Support:
    """The versions of one library that a feature supports, by one of three rules.

    Args:
        library: its name in sentences; in lower case the name of its module.
        minors: the oldest and the newest (major, minor) version, both supported.
        releases: exact versions.
        read: the oldest and the newest release whose functions were read, like all releases
            between them. A version is supported if the sources of these functions have the digests
            that they have together in one of these releases (``upstream.source``).
    """

    library: str
    minors: tuple[tuple[int, int], tuple[int, int]] | None = None
    releases: tuple[str, ...] = ()
    read: tuple[str, str] | None = None


SUPPORT: dict[str, Support] = {
    # Wraps public functions, and checks their signatures as well.
    "comm_backend": Support("DeepSpeed", minors=((0, 14), (0, 19))),
    # Rest on stage 3, the engine and the process groups in many places.
    "sharded_data_parallel_degree": Support("DeepSpeed", releases=("0.19.8",)),
    "tensor_parallel_degree": Support("DeepSpeed", releases=("0.19.8",)),
    # Replace single functions, or call them.
    "gather": Support("DeepSpeed", read=("0.16.0", "0.19.8")),
    "reduce": Support("DeepSpeed", read=("0.16.0", "0.19.8")),
    # Until 0.17.2 stage 3 has one bucket whose counter of elements is not reset.
    "overlap": Support("DeepSpeed", read=("0.17.3", "0.19.8")),
    "bucket sizes": Support("DeepSpeed", read=("0.16.0", "0.19.8")),
    "comms log": Support("DeepSpeed", read=("0.16.0", "0.19.8")),
    "monitor": Support("DeepSpeed", read=("0.16.0", "0.19.8")),
    "fsdp backward": Support("torch", read=("2.11.0", "2.15.0")),
    # Wraps a public function, and checks its signature.
    "split_group": Support("torch", minors=((2, 11), (2, 15))),
}


def refusal(feature: str, module: Any) -> str | None:
    """The end of a sentence that says why ``module``, the library, is not supported, or None.

    For features whose rule is ``minors`` or ``releases``. The sentence begins with the feature.
    """
    support = SUPPORT[feature]
    if support.minors is not None:
        oldest, newest = support.minors
        supported = oldest <= (module.__version_major__, module.__version_minor__) <= newest
        known = " to ".join(f"{major}.{minor}" for major, minor in support.minors)
    else:
        supported = module.__version__ in support.releases
        known = ", ".join(support.releases)
    if supported:
        return None
    return f"works with {support.library} {known}, and this is {module.__version__}"


def order(version: str) -> tuple[int, ...]:
    """A key that sorts versions: the numbers of the release."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def installed(feature: str) -> str:
    """The name and version of the library that a feature rests on."""
    library = SUPPORT[feature].library
    version = getattr(sys.modules.get(library.lower()), "__version__", None)
    if version is None:
        try:
            version = metadata.version(library.lower())
        except metadata.PackageNotFoundError:  # a source tree
            return f"this {library}"
    return f"{library} {version}"
