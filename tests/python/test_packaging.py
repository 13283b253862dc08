"""What is installed: the version, the pinned torch, builds that are refused, the extras."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import deepspeed_smddp
import ranks
import torch_pin
from deepspeed_smddp.distributed import extension

ROOT = ranks.ROOT
OTHERS = ["pydantic>=2"]
MODULE_SYMBOL = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"


def resolved(state: str) -> dict[str, Any]:
    """What the provider says in a build of this kind, called in the repository as a build is."""
    provider = torch_pin.TorchPin()
    provider.build_state(state)
    return provider.dynamic_metadata({"dependencies": OTHERS}, {})


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``torch_is("2.13.1+cu130")``: the version that the build finds; None: no torch."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(torch_pin.LOCAL_VERSION, raising=False)

    def install(version: str | None) -> None:
        def find(name: str) -> str:
            assert name == "torch"
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(torch_pin.metadata, "version", find)

    return install


# ---- version and torch


def test_a_build_pins_the_minor_version_of_its_torch(torch_is: Any) -> None:
    torch_is("2.13.1+cu130")
    assert (
        resolved("wheel")
        == resolved("editable")
        == {
            "version": deepspeed_smddp.__version__,
            "dependencies": ["torch==2.13.*", *OTHERS],
        }
    )


def test_a_wheel_of_a_release_names_its_torch(
    torch_is: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_is("2.14.1")
    monkeypatch.setenv(torch_pin.LOCAL_VERSION, "1")
    assert resolved("wheel")["version"] == f"{deepspeed_smddp.__version__}+torch2.14"
    # pip compares the version of an sdist with that of the wheel that it builds of it.
    assert resolved("sdist")["version"] == deepspeed_smddp.__version__


def test_an_sdist_needs_no_torch(torch_is: Any) -> None:
    torch_is(None)
    assert resolved("sdist")["dependencies"] == ["torch>=2.11", *OTHERS]


def test_a_torch_that_is_too_old_is_refused(torch_is: Any) -> None:
    torch_is("2.9.1")
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or newer, .* has torch 2\.9\.1"):
        resolved("wheel")


def test_an_isolated_build_is_refused_with_the_command_to_use(tmp_path: Path) -> None:
    """The hook that pip calls first, in an interpreter that sees the build's tools and no torch."""
    tools = tmp_path / "site"
    tools.mkdir()
    site = Path(metadata.distribution("scikit-build-core").locate_file(""))
    for name in ("scikit_build_core", "packaging", "pathspec"):
        (tools / name).symlink_to(site / name)
    tree = tmp_path / "tree"
    (tree / "deepspeed_smddp").mkdir(parents=True)
    (tree / "tools").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tree)
    shutil.copy(ROOT / "tools/torch_pin.py", tree / "tools")
    shutil.copy(ROOT / "deepspeed_smddp/version.py", tree / "deepspeed_smddp")
    hook = "from scikit_build_core.build import prepare_metadata_for_build_wheel as p; p('out')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", hook],
        cwd=tree,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1] == torch_pin.REFUSAL
    assert "--no-build-isolation" in torch_pin.REFUSAL


# ---- the module


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the symbol version is x86-64's")
def test_the_module_loads_with_an_older_libstdcxx() -> None:
    from deepspeed_smddp import _C

    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf")
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", str(_C.__file__)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    versions = re.findall(rf"{MODULE_SYMBOL}@+(\S+)", symbols)
    assert versions == ["GLIBCXX_3.4.11"], "csrc/common/condition_variable.h is not included"


# ---- the extra `fabric`


def install_fake_mpich(site: Path, library: str) -> Path:
    """A package of the extra's name, whose libfabric is the file ``library``."""
    info = site / f"{extension.LIBFABRIC_PACKAGE}-5.0.0.dist-info"
    place = site / "lib" / "mpich"
    info.mkdir()
    place.mkdir(parents=True)
    (place / "libfabric.so.1").symlink_to(library)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {extension.LIBFABRIC_PACKAGE}\nVersion: 5.0.0\n"
    )
    (info / "RECORD").write_text("lib/mpich/libmpi.so.12,,\nlib/mpich/libfabric.so.1,,\n")
    return place / "libfabric.so.1"


def system_libfabric() -> str:
    done = ranks.python(
        """
        import ctypes, re
        ctypes.CDLL("libfabric.so.1")
        print(re.search(r"(/\\S*libfabric\\.so\\S*)", open("/proc/self/maps").read()).group(1))
        """
    )
    if done.returncode != 0:
        pytest.skip("this machine has no libfabric.so.1")
    return done.stdout.strip()


SAY_FABRIC = """
from deepspeed_smddp.distributed import extension
extension.load()
from deepspeed_smddp import _C
print(_C.fabric_description())
"""


def test_the_extras_libfabric_is_taken_by_itself(tmp_path: Path) -> None:
    if list(Path("/sys/class/infiniband").glob("*")) or list(Path("/opt/amazon/efa").glob("lib*")):
        pytest.skip("the libfabric of the RDMA device comes first here")
    copied = tmp_path / "copied.so"
    shutil.copy(system_libfabric(), copied)
    install_fake_mpich(tmp_path, str(copied))
    path = {"PYTHONPATH": f"{tmp_path}:{ranks.environment()['PYTHONPATH']}"}
    done = ranks.python(SAY_FABRIC, **path)
    assert done.returncode == 0, done.stderr
    assert f"({copied})" in done.stdout

    named = ranks.python(SAY_FABRIC, SMDDP_LIBFABRIC="libfabric.so.1", **path)
    assert "(libfabric.so.1)" in named.stdout, named.stderr


# ---- DeepSpeed on a machine without a compiler

JOIN_ALONE = """
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="{port}")
import deepspeed
deepspeed.init_distributed(dist_backend="{backend}")
print("compatible", deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])
"""


def join_alone(tmp_path: Path, backend: str) -> subprocess.CompletedProcess[str]:
    from harness.ports import free_port

    return ranks.python(
        JOIN_ALONE.format(port=free_port(), backend=backend),
        timeout=120,
        CXX="/bin/false",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
        MASTER_ADDR="127.0.0.1",
    )


def test_deepspeed_starts_without_a_compiler_over_smddp(tmp_path: Path) -> None:
    done = join_alone(tmp_path, "smddp")
    assert done.returncode == 0, done.stderr
    assert "compatible False" in done.stdout


def test_deepspeed_is_left_alone_over_another_backend(tmp_path: Path) -> None:
    done = join_alone(tmp_path, "gloo")
    assert done.returncode != 0
    assert "/bin/false" in done.stderr  # DeepSpeed's own error: nothing was changed
