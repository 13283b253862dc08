"""A venv per torch and Python, with this package built for it; DeepSpeed's versions in turn."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .cells import TREE, Cell

ROOT = Path(__file__).resolve().parents[2]
# What this package and DeepSpeed import, and what both are built with.
_TOOLS = ("setuptools<81", "wheel", "packaging", "ninja", "cmake>=3.24", "scikit-build-core>=1.0")
_IMPORTS = ("numpy", "pydantic>=2", "hjson", "typer", "rich", "matplotlib", "psutil", "py-cpuinfo")
# What the package is built from.
_PACKAGE = ("CMakeLists.txt", "LICENSE", "README.md", "csrc", "deepspeed_smddp", "pyproject.toml")
_PACKAGE += ("smddp_autoload.py", "smdistributed.py", "tools")
_COMPLETE = "has-torch.txt"  # in a venv, once torch and the tools are installed


class InstallError(RuntimeError):
    """pip failed; the message is its last error."""


class Environment:
    """One venv. It is removed by :meth:`remove`, with the build of this package for it."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        self.cell = cell
        self.venv = folder / cell.venv
        self.python = self.venv / "bin/python"
        self._source = folder / f"source-{cell.venv}"
        self._log = folder / f"{cell.venv}.txt"
        self.notes: list[str] = []  # what was installed beyond the metadata of DeepSpeed

    def make(self) -> None:
        """Makes the venv, with torch and this package; keeps what a killed run has made.

        Raises:
            InstallError: there is no such Python, or pip failed.
        """
        interpreter = find_python(self.cell.python)
        if not (self.venv / _COMPLETE).exists():
            shutil.rmtree(self.venv, ignore_errors=True)
            self._run(str(interpreter), "-m", "venv", str(self.venv))
            self._pip("--upgrade", "pip")
            self._pip(f"torch=={self.cell.torch}", *_TOOLS, *_IMPORTS)
            (self.venv / _COMPLETE).touch()
        stamp, sources = self.venv / "made-for.txt", _digest_of_sources()
        if stamp.exists() and stamp.read_text(encoding="utf-8") == sources:
            return
        self._copy_source()
        self._pip(
            "--no-build-isolation",
            "--no-deps",
            f"--config-settings=build-dir={self._source / 'build'}",
            "--config-settings=cmake.define.SMDDP_CUDA=OFF",
            str(self._source),
        )
        stamp.write_text(sources, encoding="utf-8")

    def put(self, cell: Cell, tree: Path | None) -> None:
        """Replaces DeepSpeed by the version of a cell.

        Raises:
            InstallError: pip failed.
        """
        what = str(tree) if cell.deepspeed == TREE else f"deepspeed=={cell.deepspeed}"
        self._pip("--no-build-isolation", "--upgrade", *_IMPORTS[:1], *cell.pins)
        self._pip("--no-build-isolation", what, f"torch=={self.cell.torch}", *cell.pins)

    def version(self, distribution: str) -> str:
        """The version that is installed."""
        program = f"from importlib.metadata import version; print(version({distribution!r}))"
        command = [str(self.python), "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def remove(self) -> None:
        """Deletes the venv and the build."""
        shutil.rmtree(self.venv, ignore_errors=True)
        shutil.rmtree(self._source, ignore_errors=True)

    def _copy_source(self) -> None:
        # The tree may change while a run takes hours.
        shutil.rmtree(self._source, ignore_errors=True)
        self._source.mkdir(parents=True)
        for name in _PACKAGE:
            if (ROOT / name).is_dir():
                left_out = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
                shutil.copytree(ROOT / name, self._source / name, ignore=left_out)
            else:
                shutil.copy(ROOT / name, self._source / name)

    def _pip(self, *arguments: str) -> None:
        self._run(
            str(self.python), "-m", "pip", "--disable-pip-version-check", "install", *arguments
        )

    def _run(self, *command: str) -> None:
        environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VIRTUAL_ENV"))},
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._log.open("a", encoding="utf-8") as log:
            print("$", *command, file=log, flush=True)
            ended = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if ended.returncode != 0:
            raise InstallError(self._reason(command))

    def _reason(self, command: tuple[str, ...]) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.strip() for line in lines[-60:] if "Error: " in line]
        return errors[-1][:300] if errors else f"{' '.join(command[-2:])} failed; see {self._log}"


def _digest_of_sources() -> str:
    whole = hashlib.sha256()
    for name in _PACKAGE:
        for path in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            if path.suffix not in (".so", ".pyc", ".md", "") and path.name != "_build_info.py":
                whole.update(path.read_bytes())
    return whole.hexdigest()


def find_python(version: str) -> Path:
    """An interpreter of this version: on the PATH, or of pyenv.

    Raises:
        InstallError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        asked = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        found = subprocess.run(asked, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() == version:
            return Path(candidate)
    raise InstallError(f"there is no Python {version} on this machine")
