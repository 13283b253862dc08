"""Which versions of DeepSpeed and torch each feature supports.

One table for the package. A feature that rests on more of another library supports fewer of its
versions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Support:
    """The versions of one library that a feature supports, by one of three rules.

    Args:
        library: its name in sentences; in lower case the name of its module.
        minors: the oldest and the newest (major, minor) version, both supported.
        releases: exact versions.
        source_of: the version whose functions were read. Another version is supported if
            the sources of these functions have the same digests (``upstream.source``).
    """

    library: str
    minors: tuple[tuple[int, int], tuple[int, int]] | None = None
    releases: tuple[str, ...] = ()
    source_of: str = ""


SUPPORT: dict[str, Support] = {
    # Wraps public functions, and checks their signatures as well.
    "comm_backend": Support("DeepSpeed", minors=((0, 14), (0, 19))),
    # Rest on stage 3, the engine and the process groups in many places.
    "sharded_data_parallel_degree": Support("DeepSpeed", releases=("0.19.8",)),
    "tensor_parallel_degree": Support("DeepSpeed", releases=("0.19.8",)),
    # Replace single functions, or call them.
    "gather": Support("DeepSpeed", source_of="0.19.8"),
    "reduce": Support("DeepSpeed", source_of="0.19.8"),
    "overlap": Support("DeepSpeed", source_of="0.19.8"),
    "bucket sizes": Support("DeepSpeed", source_of="0.19.8"),
    "comms log": Support("DeepSpeed", source_of="0.19.8"),
    "monitor": Support("DeepSpeed", source_of="0.19.8"),
    "fsdp backward": Support("torch", source_of="2.13"),
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


def installed(feature: str) -> str:
    """The name and version of the library that a feature rests on."""
    library = SUPPORT[feature].library
    version = getattr(sys.modules.get(library.lower()), "__version__", None)
    return f"this {library}" if version is None else f"{library} {version}"
