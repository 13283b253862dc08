"""A venv per torch and Python, with this package built for it; DeepSpeed's versions in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.jobs import ROOT

from .cells import TREE, Cell

# What this package and DeepSpeed import, and what both are built with.
_TOOLS = ("setuptools<81", "wheel", "packaging", "ninja", "cmake>=3.24", "scikit-build-core>=1.0")
_IMPORTS = ("numpy", "pydantic>=2", "hjson", "typer", "rich", "matplotlib", "psutil", "py-cpuinfo")
# What the package is built from.
_PACKAGE = ("CMakeLists.txt", "LICENSE", "README.md", "csrc", "deepspeed_smddp", "pyproject.toml")
_PACKAGE += ("smddp_autoload.py", "smdistributed.py", "tools")


class InstallError(RuntimeError):
    """pip failed; the message is its last error."""


class Environment:
    """One venv, with torch and this package; what a killed run has made is kept.

    Raises:
        InstallError: there is no such Python, or pip failed.
    """

    def __init__(self, folder: Path, cell: Cell) -> None:
        self.cell = cell
        self.venv = folder / cell.venv
        self.python = self.venv / "bin/python"
        self._build = folder / f"build-{cell.venv}"
        self._log = folder / f"{cell.venv}.txt"
        interpreter = find_python(cell.python)
        complete = self.venv / "has-torch.txt"
        if not complete.exists():
            self.remove()
            self._run(str(interpreter), "-m", "venv", str(self.venv))
            self._pip("--upgrade", "pip")
            self._pip(f"torch=={cell.torch}", *_TOOLS, *_IMPORTS)
            complete.touch()
        # A copy, as the tree may change while a run takes hours. It keeps the files' times: what
        # the same build has compiled is not compiled again.
        source = self._build / "source"
        shutil.rmtree(source, ignore_errors=True)
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
        for name in _PACKAGE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=left_out)
            else:
                source.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
        self._pip(
            "--no-build-isolation",
            "--no-deps",
            f"--config-settings=build-dir={self._build / 'cmake'}",
            "--config-settings=cmake.define.SMDDP_CUDA=OFF",
            str(source),
        )

    def put(self, cell: Cell, tree: Path | None) -> None:
        """Replaces DeepSpeed by the version of a cell.

        Raises:
            InstallError: pip failed.
        """
        what = str(tree) if cell.deepspeed == TREE else f"deepspeed=={cell.deepspeed}"
        self._pip("--no-build-isolation", "--upgrade", _IMPORTS[0])
        self._pip("--no-build-isolation", what, f"torch=={self.cell.torch}")

    def version(self, distribution: str) -> str:
        """The version that is installed."""
        program = f"from importlib.metadata import version; print(version({distribution!r}))"
        return subprocess.check_output([self.python, "-c", program], text=True).strip()

    def remove(self) -> None:
        """Deletes the venv and the build."""
        shutil.rmtree(self.venv, ignore_errors=True)
        shutil.rmtree(self._build, ignore_errors=True)

    def _pip(self, *arguments: str) -> None:
        pip = (str(self.python), "-m", "pip", "--disable-pip-version-check", "install")
        self._run(*pip, *arguments)

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
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:]
            errors = [line.strip()[:300] for line in lines if "Error: " in line]
            failed = f"{' '.join(command[-2:])} failed; see {self._log}"
            raise InstallError((errors or [failed])[-1])


def find_python(version: str) -> Path:
    """An interpreter of this version: of pyenv, or on the PATH.

    Raises:
        InstallError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    found = next(filter(None, candidates), None)
    if found is None:
        raise InstallError(f"there is no Python {version} on this machine")
    return Path(found)
