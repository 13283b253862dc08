"""Builds of this package: the one of this tree, and another one to compare it with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .host_set import ROOT
from .provenance import source_version

OTHER = "-other"  # ends the names of the other build's competitors
OTHER_BUILD_HELP = (
    "another tree of this package, with build/ and .venv/ as `make bench-programs` makes them, for "
    "instance a checkout of the commit before a change: it takes turns with this one. Competitors "
    f"that end in {OTHER} are of that build, and a table compares the two builds"
)


@dataclass(frozen=True)
class Build:
    """Where the programs of a build are, and how its competitors are named."""

    core: Path  # the program core_collectives
    python: Path  # the interpreter that imports the build's deepspeed_smddp
    tree: Path
    suffix: str = ""

    def missing_core(self) -> str | None:
        if self.core.exists():
            return None
        where = f" in {self.tree}" if self.suffix else ""
        return f"{self.core} is not built; `make bench-programs`{where} builds it"

    def missing_package(self) -> str | None:
        """The reason why the interpreter cannot run this build's package, or None."""
        if not self.suffix:
            return None
        if not self.python.exists():
            return f"{self.python} does not exist; `make build` in {self.tree} makes it"
        found = self._imported_from()
        if found is None:
            return (
                f"{self.python} finds no deepspeed_smddp; `make build` in {self.tree} installs it"
            )
        if found != self.tree.resolve():
            return f"{self.python} imports deepspeed_smddp from {found}, not from {self.tree}"
        return None

    def _imported_from(self) -> Path | None:
        find = "import importlib.util as u; print(u.find_spec('deepspeed_smddp').origin)"
        argv = [str(self.python), "-c", find]  # in /, as Python looks into its working directory
        done = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False)
        return Path(done.stdout.strip()).resolve().parents[1] if done.returncode == 0 else None

    def core_version(self) -> str:
        return source_version(self.tree)

    def package_version(self) -> str:
        return source_version(self.tree if self.suffix else imported_tree())


def this_build(core: Path | None = None) -> Build:
    program = core or ROOT / "build/benchmarks/core_collectives"
    return Build(program, Path(sys.executable), ROOT)


def other_build(tree: Path) -> Build:
    tree = tree.absolute()
    python = tree / ".venv/bin/python"
    return Build(tree / "build/benchmarks/core_collectives", python, tree, OTHER)


def imported_tree() -> Path:
    """The tree whose package this interpreter imports."""
    package = importlib.util.find_spec("deepspeed_smddp")
    if package is None or package.origin is None:
        return ROOT
    return Path(package.origin).resolve().parents[1]
