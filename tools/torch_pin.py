"""Metadata that the build computes: the version, and the torch that the compiled module needs.

scikit-build-core calls it (``[[tool.dynamic-metadata]]`` in pyproject.toml). Between minor versions
of torch the C++ classes that the module derives from change, so whatever is built with torch 2.13
requires torch 2.13. An isolated build has no torch, or one that is not the user's: it is refused.

A wheel of a release says in its version which torch it is for (``0.2.0+torch2.13``), as one index
holds a wheel for each. ``tools/wheels.py`` asks for that by ``LOCAL_VERSION``; a wheel that pip
builds of an sdist must have the version of the sdist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

LOCAL_VERSION = "DEEPSPEED_SMDDP_LOCAL_VERSION"
OLDEST = (2, 11)

REFUSAL = (
    "deepspeed-smddp is compiled for the torch that it will run with, and this build does not see "
    "one: `pip install torch scikit-build-core cmake ninja`, then run the same command with "
    "`--no-build-isolation` (`pip install --no-build-isolation deepspeed-smddp`)."
)
TOO_OLD = "deepspeed-smddp needs torch {oldest} or newer, and this environment has torch {found}."
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class TorchPin:
    """The provider; ``build_state`` says whether an sdist or a wheel is made."""

    def __init__(self) -> None:
        self._for_sdist = False

    def build_state(self, build_state: str) -> None:
        """Called first, with ``sdist``, ``wheel``, ``editable``, or the metadata of these."""
        self._for_sdist = build_state == "sdist"

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """The fields that a wheel may have otherwise than the sdist that it is built of."""
        return {"dependencies": True}

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """``version`` and ``dependencies`` of ``[project]``.

        Args:
            settings: ``dependencies``, those besides torch.

        Raises:
            SystemExit: a wheel is to be built, and there is no torch, or one that is too old.
        """
        version = package_version(Path("deepspeed_smddp/version.py"))
        if self._for_sdist:
            torch = ">=" + ".".join(map(str, OLDEST))
        else:
            minor = torch_minor()
            torch = f"=={minor}.*"
            if os.environ.get(LOCAL_VERSION) == "1":
                version += f"+torch{minor}"
        return {"version": version, "dependencies": [f"torch{torch}", *settings["dependencies"]]}


def package_version(module: Path) -> str:
    """``__version__`` of the package, read without an import."""
    found = _VERSION.search(module.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f'{module} has no line __version__ = "..."')
    return found.group(1)


def torch_minor() -> str:
    """``2.13`` if this environment has torch 2.13.0+cpu."""
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise SystemExit(REFUSAL) from None
    minor = tuple(int(number) for number in found.split("+")[0].split(".")[:2])
    if minor < OLDEST:
        raise SystemExit(TOO_OLD.format(oldest=".".join(map(str, OLDEST)), found=found))
    return ".".join(map(str, minor))
