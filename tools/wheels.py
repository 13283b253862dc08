#!/usr/bin/env python3
"""Build the wheel of each torch, and the sdist.

    tools/wheels.py [--python python3.11] [--torch 2.13.0]... [--out dist]

The sdist comes first, and every wheel is built of the sdist: what it lacks is missing in the wheel,
too. Each torch gets a virtual environment of its own below --environments, which is kept for the
next run. auditwheel then looks at the symbols that the module needs of glibc and libstdc++, and
writes the manylinux tag that they allow into the wheel. torch's own libraries stay outside: they
come with torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_pin import LOCAL_VERSION

ROOT = Path(__file__).resolve().parent.parent
# Loaded by torch before the module is.
OF_TORCH = ("libtorch*.so", "libc10*.so", "libshm.so")


def make_sdist(out: Path) -> Path:
    """``deepspeed_smddp-0.2.0.tar.gz`` of this tree."""
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(out)!r})"
    for old in out.glob("deepspeed_smddp-*.tar.gz"):
        old.unlink()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return next(out.glob("deepspeed_smddp-*.tar.gz"))


def environment_for(torch: str, python: str, folder: Path, pip_args: list[str]) -> Path:
    """The ``bin`` of a virtual environment with this torch and the tools of the build."""
    place = folder / f"torch-{torch}-{Path(python).name}"
    bin_ = place / "bin"
    if not (bin_ / "python").exists():
        subprocess.run([python, "-m", "venv", place], check=True)
    pip = [bin_ / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *pip_args, f"torch=={torch}"], check=True)
    lists = [
        option for name in ("build", "wheels") for option in ("-r", f"requirements/{name}.txt")
    ]
    subprocess.run([*pip, *lists], cwd=ROOT, check=True)
    return bin_


def make_wheel(sdist: Path, bin_: Path, out: Path) -> Path:
    """Compiles the sdist against the environment's torch, and tags the result."""
    env = {**os.environ, LOCAL_VERSION: "1", "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as scratch:
        pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
        command = [*pip, "--no-build-isolation", "--wheel-dir", scratch, sdist]
        subprocess.run(command, env=env, check=True)
        (plain,) = Path(scratch).glob("*.whl")
        tagged = Path(scratch) / "tagged"
        excluded = [f"--exclude={name}" for name in OF_TORCH]
        command = [bin_ / "auditwheel", "repair", *excluded, "--wheel-dir", tagged, plain]
        subprocess.run(command, env=env, check=True)
        (wheel,) = tagged.glob("*.whl")
        target = out / wheel.name
        target.write_bytes(wheel.read_bytes())
    return target


def main() -> None:
    """Prints the files that it made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that a wheel is for")
    parser.add_argument("--torch", action="append", help="release of torch; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--pip-args", default="", help="further arguments of pip for torch")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.environments.mkdir(parents=True, exist_ok=True)
    sdist = make_sdist(args.out.resolve())
    made = [sdist]
    for torch in args.torch or ["2.13.0"]:
        bin_ = environment_for(
            torch, args.python, args.environments.resolve(), args.pip_args.split()
        )
        made.append(make_wheel(sdist, bin_, args.out.resolve()))
    for file in made:
        print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}")


if __name__ == "__main__":
    main()
