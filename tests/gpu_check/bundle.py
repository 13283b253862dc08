"""Makes ``gpu-bundle/`` and a tar file of it and the source, for machines without a network.

The folder has the wheels of what the check needs beside torch (for one version of Python, on
x86-64), the headers of libfabric and of Python, and a libfabric. ``build`` uses it.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

from gpu_check.machine import BUNDLE, ROOT, SOURCE_VERSION, source

REQUIREMENTS = ROOT / "requirements" / "gpu-check.txt"
# pip matches each platform exactly.
GLIBC = ("2_28", "2_27", "2_17", "2_12", "2_5")
PLATFORMS = [f"manylinux_{glibc}_x86_64" for glibc in GLIBC]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
# A wheel that has a libfabric without dependencies (2.x: tcp, shm; efa and verbs as plugins).
LIBFABRIC_WHEEL = "mpich==5.0.2"
LIBFABRIC_IN_WHEEL = "data/lib/mpich/libfabric"
# Only a source distribution on the registry; its wheel is made here, without compiled operations.
FROM_SOURCE = ("deepspeed",)
LARGE = 64 << 20


def requirements(without: list[str]) -> list[str]:
    """The pinned requirements, less the distributions named in ``without``."""
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    wanted = [line for line in lines if line]
    known = {_name(line) for line in wanted}
    unknown = sorted(set(without) - known)
    if unknown:
        raise SystemExit(f"--without names {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [line for line in wanted if _name(line) not in without]


def _name(requirement: str) -> str:
    return requirement.partition("==")[0].lower()


def pip(*arguments: str) -> None:
    """Runs this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def wheels(folder: Path, wanted: list[str], python: str) -> None:
    """Downloads the wheels for this version of Python, whatever version runs here."""
    folder.mkdir(parents=True)
    binary = [line for line in wanted if _name(line) not in FROM_SOURCE]
    download(folder, binary, python)
    for line in wanted:
        if line not in binary:
            pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), line)


def download(folder: Path, wanted: list[str], python: str) -> None:
    """Downloads wheels and nothing that they depend on."""
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip("download", "--no-deps", *target, "-d", str(folder), *wanted)


def libfabric(folder: Path, python: str) -> None:
    """The shared objects of the wheel's libfabric, and its providers beside it."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as directory:
        download(Path(directory), [LIBFABRIC_WHEEL], python)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if LIBFABRIC_IN_WHEEL in entry and not entry.endswith("/"):
                    (folder / Path(entry).name).write_bytes(archive.read(entry))


def headers(folder: Path, python: str, python_headers: Path | None) -> None:
    """libfabric's headers, and those of Python, which a machine may have without its headers."""
    fabric = Path("/usr/include/rdma")
    if not (fabric / "fabric.h").is_file():
        raise SystemExit(f"{fabric}/fabric.h is missing here: apt install libfabric-dev")
    for below in ("", "providers"):
        (folder / "rdma" / below).mkdir(parents=True)
        for header in sorted((fabric / below).glob("f[ai]*.h")):  # fabric.h, fi_*.h
            shutil.copy2(header, folder / "rdma" / below)
    if python_headers is not None:
        shutil.copytree(python_headers, folder / f"python{python}")


def headers_of_python(python: str) -> Path | None:
    """The folder with this version's ``Python.h``, if an interpreter of it is at hand."""
    if python == f"{sys.version_info[0]}.{sys.version_info[1]}":
        found = Path(sysconfig.get_paths()["include"])
        return found if (found / "Python.h").is_file() else None
    code = "import sysconfig; print(sysconfig.get_paths()['include'])"
    try:
        done = subprocess.run([f"python{python}", "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    found = Path(done.stdout.strip() or "/nowhere")
    return found if (found / "Python.h").is_file() else None


def tar(path: Path) -> None:
    """The committed source, and the bundle, in one file with one folder at its top."""
    top = "deepspeed-smddp"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["git", "-C", str(ROOT), "archive", f"--prefix={top}/", "HEAD"],
        check=True,
        capture_output=True,
    ).stdout
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w") as out, tarfile.open(fileobj=io.BytesIO(made)) as tree:
        for member in tree:
            out.addfile(member, tree.extractfile(member) if member.isfile() else None)
        out.add(BUNDLE, f"{top}/{BUNDLE.name}")
    partial.replace(path)


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: list[str]) -> int:
    """Makes the folder anew, then the tar file; prints what they hold."""
    parser = argparse.ArgumentParser(prog="make gpu-bundle", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    parser.add_argument("--without", nargs="*", default=[], help="what that machine has already")
    parser.add_argument("--tar", type=Path, default=ROOT / "dist" / "smddp-gpu-bundle.tar")
    given = parser.parse_args(arguments)
    wanted = requirements([name.lower() for name in given.without])
    shutil.rmtree(BUNDLE, ignore_errors=True)
    print(f"{len(wanted)} wheels for Python {given.python}, x86-64")
    wheels(BUNDLE / "wheels", wanted, given.python)
    libfabric(BUNDLE / "lib", given.python)
    python_headers = headers_of_python(given.python)
    headers(BUNDLE / "include", given.python, python_headers)
    if python_headers is None:
        print(f"no python{given.python} here: the GPU machine needs its headers (python3-dev)")
    (BUNDLE / "requirements.txt").write_text("\n".join(wanted) + "\n")
    (BUNDLE / SOURCE_VERSION).write_text(source() + "\n")
    tar(given.tar)
    size = size_of(BUNDLE)
    print(f"{BUNDLE.relative_to(ROOT)}: {size / 2**20:.1f} MiB, and with the source {given.tar}")
    if size > LARGE:
        largest = sorted((BUNDLE / "wheels").iterdir(), key=lambda path: -path.stat().st_size)[:4]
        names = " ".join(path.name.partition("-")[0] for path in largest)
        print(
            f"It is larger than {LARGE >> 20} MiB; if the GPU machine has some of the largest "
            f'wheels: make gpu-bundle BUNDLE_WITHOUT="{names}"'
        )
    return 0
