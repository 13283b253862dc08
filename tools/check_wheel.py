#!/usr/bin/env python3
"""Install a wheel where no compiler can be found, and train with it.

    tools/check_wheel.py dist/deepspeed_smddp-*.whl [--steps 40] [--keep DIRECTORY]

Makes a fresh virtual environment with a PATH that has a few tools of the system and no compiler,
and installs the wheel with its extra `fabric`, DeepSpeed and transformers. Then, outside this tree:
two ranks make the default group and compare an AllGather, on one host and as two hosts over the
libfabric of the extra; and the demo trains. Each step prints one line; the first that fails ends
the check.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What shells, pip and DeepSpeed's launcher call. No compiler, linker, CMake or ninja.
TOOLS = ("bash", "sh", "env", "cat", "ls", "uname", "hostname", "id", "lscpu", "ldconfig", "which")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ld", "cmake", "ninja", "make")

GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
out = torch.empty(size * 100_000)
dist.all_gather_into_tensor(out, torch.full((100_000,), float(rank)))
assert torch.equal(out, torch.arange(size).repeat_interleave(100_000).float())
import deepspeed_smddp
from deepspeed_smddp import _C
paths = {row["path"] for row in deepspeed_smddp.statistics() if row["calls"]}
if rank == 0:
    print("package", os.path.dirname(deepspeed_smddp.__file__))
    print("paths", sorted(paths))
    print("fabric", _C.fabric_description())
dist.destroy_process_group()
"""


class Failed(Exception):
    """A step of the check failed; the message has its output."""


class Bench:
    """The virtual environment, and the folder that everything runs in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        for name in TOOLS:
            found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
            if found:
                (tools / name).symlink_to(found)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        kept = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")
        kept_prefixes = ("PIP_", "LC_", "REQUESTS_")
        self.env = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith(kept_prefixes)
        }
        self.env.update(
            PATH=f"{folder / 'venv' / 'bin'}{os.pathsep}{tools}",
            CC="/bin/false",
            CXX="/bin/false",
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            GLOO_SOCKET_IFNAME="lo",
            SMDDP_FABRIC_INTERFACE="lo",
            OMP_NUM_THREADS="1",
            TORCH_EXTENSIONS_DIR=str(folder / "torch_extensions"),
        )

    def run(self, *command: str | Path, limit: float = 900, **env: str) -> str:
        """Standard output and error of a command that must succeed."""
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        if done.returncode != 0:
            command_line = " ".join(map(str, command))
            raise Failed(f"{command_line}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def python(self, *arguments: str | Path, **env: str) -> str:
        """The same with the environment's interpreter."""
        return self.run(self.folder / "venv" / "bin" / "python", *arguments, **env)

    def install(self, *arguments: str) -> None:
        """``pip install``."""
        self.python("-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments)


def search(pattern: str, text: str) -> str:
    """The first group of the match."""
    found = re.search(pattern, text)
    if found is None:
        raise Failed(f"no {pattern!r} in\n{text}")
    return found.group(1)


def install(bench: Bench, wheel: Path, pip_args: list[str]) -> None:
    """The wheel and the extra, once it is clear that nothing can compile."""
    found = bench.python(
        "-c", f"import shutil; print([n for n in {COMPILERS!r} if shutil.which(n)])"
    )
    if found.strip() != "[]":
        raise Failed(f"the check's PATH has compilers: {found}")
    bench.install(*pip_args, f"{wheel}[fabric]")
    said = bench.python("-m", "pip", "show", "torch", "deepspeed-smddp", "mpich")
    versions = re.findall(r"^Name: (.*)\nVersion: (.*)$", said, re.MULTILINE)
    print("installed without a compiler:", ", ".join(" ".join(pair) for pair in versions))


def check_group(bench: Bench, hosts: int) -> None:
    """Two ranks on one host, or each on a host of its own."""
    (bench.folder / "group.py").write_text(GROUP)
    of_rank = "$LOCAL_RANK" if hosts == 2 else "0"
    shell = f"SMDDP_HOST_ID=host{of_rank} exec python group.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    said = bench.python(*launch, "bash", "-c", shell)
    package = search(r"package (.*)", said)
    if not Path(package).is_relative_to(bench.folder):
        raise Failed(f"the ranks imported {package}, not the wheel")
    paths = search(r"paths (.*)", said)
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    print(f"AllGather on {where}: {paths}; {search('fabric (.*)', said)}")


def check_demo(bench: Bench, steps: int) -> None:
    """The demo as a user starts it, with the sources of examples/ copied out of this tree."""
    shutil.copytree(ROOT / "examples", bench.folder / "examples")
    shutil.copytree(ROOT / "ds_configs", bench.folder / "ds_configs")
    begun = time.monotonic()
    said = bench.run(
        *("deepspeed", "--num_gpus", "2", "examples/train.py", "--no-progress"),
        *("--deepspeed_config", "ds_configs/quickstart.json", "--steps", str(steps)),
    )
    fallback = search(r"by the fallback, all ranks: (\d+) bytes", said)
    if fallback != "0":
        raise Failed(f"the fallback carried {fallback} bytes\n{said}")
    loss = search(r"final loss ([\d.]+)", said)
    entropy = search(r"unigram entropy ([\d.]+)", said)
    if float(loss) >= float(entropy) + 2:
        raise Failed(f"the demo does not learn\n{said}")
    seconds = time.monotonic() - begun
    print(
        f"demo, {steps} steps in {seconds:.0f} s with its start: final loss {loss}, "
        f"unigram entropy {entropy}, {fallback} bytes on the fallback"
    )


def main() -> int:
    """The exit status: 0 if every step succeeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="of the demo")
    parser.add_argument("--deepspeed", default="deepspeed==0.19.8 transformers==5.23.0")
    parser.add_argument("--pip-args", default="", help="of pip for torch and the wheel")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which stays")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench((args.keep or Path(scratch)).resolve())
        try:
            install(bench, args.wheel.resolve(), args.pip_args.split())
            check_group(bench, hosts=1)
            check_group(bench, hosts=2)
            bench.install("setuptools", "wheel")
            bench.install("--no-build-isolation", *args.deepspeed.split())
            check_demo(bench, args.steps)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 1
    print("the wheel works without a compiler")
    return 0


if __name__ == "__main__":
    sys.exit(main())
