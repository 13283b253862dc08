"""Makes the environment of the check, without a network, and compiles the extension.

The environment lies over that of the given interpreter: it sees all that is installed there, and
adds from the bundle's wheels what is missing or too old.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from gpu_check import machine
from gpu_check.machine import BUNDLE, ROOT, libfabric, tool
from gpu_check.step import Run

FOLDER = ROOT / "build" / "gpu-check"
PYTHON = FOLDER / "venv" / "bin" / "python"
NEEDS = ROOT / "requirements" / "gpu-check.in"
BENCHMARKS = FOLDER / "cmake" / "benchmarks"
PATHS = (ROOT / "tests", ROOT / "tests" / "python")


class BuildError(Exception):
    """The build can't go on; the message is one sentence."""


def environment() -> dict[str, str]:
    """The variables of every process of the check."""
    path = [str(PYTHON.parent), os.environ.get("PATH", "")]
    nvcc = tool("nvcc")
    if nvcc is not None:
        path.append(str(Path(nvcc).parent))
    return {
        **os.environ,
        **libfabric(),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "SMDDP_FABRIC_INTERFACE": os.environ.get("SMDDP_FABRIC_INTERFACE", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "torch_extensions"),
        "PYTHONUNBUFFERED": "1",
    }


def run(argv: list[str], what: str) -> None:
    """Runs a command whose output goes to this process's own.

    Raises:
        BuildError: it failed; names ``what``.
    """
    print("+", shlex.join(argv), flush=True)
    done = subprocess.run(argv, cwd=ROOT, env=environment(), check=False)
    if done.returncode != 0:
        raise BuildError(f"{what} failed with exit status {done.returncode}")


def prepare() -> None:
    """The environment, with everything that the check imports."""
    if not (FOLDER / "venv" / ".complete").exists():
        make_overlay()
        install()
        (FOLDER / "venv" / ".complete").touch()


def make_overlay() -> None:
    """An environment that sees the packages of the running interpreter, an environment or not."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Without pip: Debian's and Ubuntu's Python has no ensurepip unless python3-venv is installed.
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(FOLDER / "venv")], "venv")
    below = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
    below |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = FOLDER / "venv" / "lib" / version / "site-packages"
    (site / "below.pth").write_text("\n".join(sorted(below)) + "\n")


def pip() -> list[str]:
    """The command of pip in the environment: the machine's own, or the wheel of the bundle."""
    done = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False)
    if done.returncode == 0:
        return [str(PYTHON), "-m", "pip"]
    carried = sorted((BUNDLE / "wheels").glob("pip-*.whl"))
    if not carried:
        raise BuildError(f"{sys.executable} has no pip, and {BUNDLE} has none: make gpu-bundle")
    return [str(PYTHON), f"{carried[-1]}/pip"]


def install() -> None:
    """What is missing or too old, from the bundle; a version that fits is left as it is."""
    command = [*pip(), "install", "--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--no-index"]
    wheels = BUNDLE / "wheels"
    if not wheels.is_dir():
        print(f"{BUNDLE} does not exist: {sys.executable} must have all packages", flush=True)
    found = ["--find-links", str(wheels)] if wheels.is_dir() else []
    run(
        [*command, *found, "-r", str(NEEDS)],
        "pip install from the bundle (make gpu-bundle)",
    )
    here = ["--no-deps", "--no-build-isolation", "--config-settings=wheel.cmake=false"]
    here += ["--config-settings=editable.mode=inplace", "--editable", str(ROOT)]
    run([*command, *here], "pip install of this package")


def compile_extension() -> None:
    """The extension, with kernels if nvcc is there, into the package of this tree."""
    build = FOLDER / "cmake"
    arguments = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DSMDDP_PYTHON={PYTHON}"]
    arguments += [f"-DPython3_EXECUTABLE={PYTHON}"]
    carried = BUNDLE / "include"
    if not Path("/usr/include/rdma/fabric.h").exists() and (carried / "rdma").is_dir():
        arguments.append(f"-DLIBFABRIC_INCLUDE={carried}")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    installed = Path(sysconfig.get_paths()["include"])
    if not (installed / "Python.h").exists():
        if not (carried / version / "Python.h").exists():
            raise BuildError(f"{installed}/Python.h is missing: install {version}-dev")
        arguments.append(f"-DPython3_INCLUDE_DIR={carried / version}")
        arguments.append(f"-DCMAKE_CXX_FLAGS=-isystem {carried / version}")
    nvcc = tool("nvcc")
    arguments.append("-DSMDDP_CUDA=ON" if nvcc else "-DSMDDP_CUDA=OFF")
    arguments += [f"-DSMDDP_NVCC={nvcc}", "-DSMDDP_BENCHMARKS=ON"] if nvcc else []
    cmake = str(_program("cmake"))
    ninja = f"-DCMAKE_MAKE_PROGRAM={_program('ninja')}"
    run([cmake, "-S", str(ROOT), "-B", str(build), ninja, *arguments], "cmake")
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), _memory_gib() // 2)))
    targets = ["_C", "coding_gpu", "reduce_gpu"] if nvcc else ["_C"]
    run([cmake, "--build", str(build), "--parallel", jobs, "--target", *targets], "the compiler")


def _program(name: str) -> Path:
    for folder in environment()["PATH"].split(os.pathsep):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    # The machine's own package has its programs beside the interpreter below.
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return beside
    raise BuildError(f"{name} is missing on the PATH and in the bundle: make gpu-bundle")


def _memory_gib() -> int:
    text = Path("/proc/meminfo").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) >> 20


def check_import() -> None:
    """The extension loads, and says whether it has kernels."""
    code = (
        "import deepspeed_smddp, torch.distributed as d; "
        "from deepspeed_smddp.distributed import extension; "
        "extension.load(); from deepspeed_smddp import _C; "
        "print('torch', _C.BUILT_WITH_TORCH, _C.device_statistics())"
    )
    run([str(PYTHON), "-c", code], "the import of the extension")


def main(step: Run) -> None:
    """The whole build, as a step; what is up to date is left alone. Needs no GPU."""
    step.note("machine", machine.facts())
    prepare()
    compile_extension()
    check_import()
    step.note("extension", "built, and loads")
