"""tools/check_walls.py finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_walls.py"

CLEAN = {
    "common/status.h": "#pragma once\n",
    "fabric/rail.cc": '#include <rdma/fabric.h>\n#include "common/status.h"\nfi_info* info;\n',
    "kernels/reduction.h": "#pragma once\n",
    "device/cuda_device.cc": "#include <cuda.h>\nCUdeviceptr pointer; auto x = cuInit(0);\n",
    "device/host_device.h": '#include "kernels/reduction.h"\n',
    "intranode/copy_engine.cc": "auto x = cuMemcpyAsync(a, b, 1, s);\n",
    "progress/task.h": '// FI_EAGAIN is not an error\n#include "fabric/rail.h"\n',
    "torch/module.cc": '#include <torch/extension.h>\n#include "progress/task.h"\nc10d::Work w;\n',
}


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(CHECK), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_walls_of_this_tree() -> None:
    result = subprocess.run(
        [sys.executable, str(CHECK)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_clean_tree(tmp_path: Path) -> None:
    result = check(tmp_path, CLEAN)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("collectives/a.cc", "#include <torch/types.h>\n", "torch/types.h; torch"),
        ("collectives/a.cc", "#include <c10/util/Optional.h>\n", "torch stays"),
        ("progress/a.cc", "int x;\nat::Tensor t;\n", "csrc/progress/a.cc:2: names at::Tensor"),
        ("intranode/ipc.cc", "#include <cuda_runtime.h>\n", "CUDA stays"),
        ("intranode/ipc.cc", "cuIpcOpenMemHandle(p, h, 0);\n", "CUDA stays"),
        ("torch/group.cc", "cudaStreamSynchronize(s);\n", "CUDA stays"),
        ("progress/a.cc", "#include <rdma/fi_endpoint.h>\n", "libfabric stays"),
        ("collectives/a.cc", "if (rc == -FI_EAGAIN) retry();\n", "names FI_EAGAIN"),
        ("torch/group.cc", "fi_send(ep);\n", "names fi_send"),
        ("common/a.h", '#include "fabric/rail.cc"\n', "fabric/rail.cc, but only its own files."),
        ("intranode/a.h", '#include "fabric/rail.cc"\n', "but only common, kernels, device."),
        ("kernels/a.h", '#include "device/host_device.h"\n', "kernels/ must not include device/"),
        ("patterns/a.h", '#include "progress/task.h"\n', "patterns/ must not include progress/"),
        ("collectives/a.h", '#include "device/host_device.h"\n', "must not include device/"),
        ("gpu_collectives/a.h", '#include "fabric/rail.cc"\n', "must not include fabric/"),
        ("torch/a.h", '#include "kernels/reduction.h"\n', "torch/ must not include kernels/"),
        ("device/a.h", '#include "topology/t.h"\n', None),  # no such file: not ours
        ("common/status.h", '#include "status.h"\n', "include cycle common/status.h"),
        ("helpers/a.h", "int x;\n", "'helpers' is not a room"),
    ],
)
def test_breach_is_found(tmp_path: Path, name: str, text: str, said: str | None) -> None:
    result = check(tmp_path, {**CLEAN, name: text})
    if said is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1
        assert said in result.stderr


def test_cycle_of_three_files(tmp_path: Path) -> None:
    files = {
        "common/a.h": '#include "common/b.h"\n',
        "common/b.h": '#include "c.h"\n',
        "common/c.h": '#include "common/a.h"\n',
    }
    result = check(tmp_path, files)
    assert result.returncode == 1
    assert "common/a.h -> common/b.h -> common/c.h -> common/a.h" in result.stderr


def test_words_in_comments_and_strings_are_no_breach(tmp_path: Path) -> None:
    text = '/* at::Tensor\n fi_send */ // cudaMalloc\nauto s = "fi_info; cuInit; torch::x";\n'
    result = check(tmp_path, {"progress/a.cc": text})
    assert result.returncode == 0, result.stderr


def test_core_tests_do_not_include_torch(tmp_path: Path) -> None:
    test = tmp_path / "tests" / "cpp" / "a_test.cc"
    test.parent.mkdir(parents=True)
    test.write_text("#include <torch/types.h>\n")
    result = check(tmp_path, CLEAN)
    assert result.returncode == 1
    assert "tests/cpp/a_test.cc:1" in result.stderr


PACKAGE = {
    "__init__.py": "from deepspeed_smddp.offload import Offload\n__version__ = '1'\n",
    "_C.pyi": "def statistics() -> list: ...\n",
    "settings.py": "def load() -> None:\n    from deepspeed_smddp import _C\n",
    "upstream/__init__.py": "",
    "upstream/source.py": "from deepspeed_smddp import settings\nP = 'deepspeed.runtime.zero'\n",
    "offload/__init__.py": "from deepspeed_smddp.offload.model import Offload\n",
    "offload/model.py": "from ..upstream import source\nfrom . import window\nclass Offload: ...\n",
    "offload/window.py": "from typing import Any\n",
    "zero/__init__.py": "",
    "zero/hooks.py": "import deepspeed.runtime.zero\nfrom deepspeed_smddp.offload import model\n",
    "compat/__init__.py": "",
    "compat/smdistributed/__init__.py": "",
    "compat/smdistributed/zero.py": "",
}


def check_package(root: Path, changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in {**PACKAGE, **changes}.items():
        path = root / "deepspeed_smddp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check(root, CLEAN)


def test_clean_package(tmp_path: Path) -> None:
    result = check_package(tmp_path, {})
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        # A cycle: at the top, in a function, for types, relative, and by way of a package.
        ("zero/a.py", "from deepspeed_smddp.zero import a\n", "zero.a -> deepspeed_smddp.zero.a"),
        (
            "offload/window.py",
            "import deepspeed_smddp.offload.model\n",
            "import cycle deepspeed_smddp.offload.model -> deepspeed_smddp.offload.window -> "
            "deepspeed_smddp.offload.model",
        ),
        ("offload/window.py", "def f():\n    from .model import Offload\n", "import cycle"),
        (
            "offload/window.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import model\n",
            "import cycle",
        ),
        ("offload/window.py", "from deepspeed_smddp.offload import Offload\n", "import cycle"),
        ("offload/window.py", "from deepspeed_smddp import __version__\n", "import cycle"),
        ("settings.py", "from deepspeed_smddp.upstream.source import P\n", "import cycle"),
        # Two modules with one name; a package counts by its directory.
        (
            "zero/model.py",
            "",
            "offload/model.py, deepspeed_smddp/zero/model.py: 2 modules have the name model",
        ),
        ("zero/offload.py", "", "2 modules have the name offload"),
        ("zero/deep/zero.py", "", "2 modules have the name zero"),
        # Rooms.
        ("upstream/a.py", "import deepspeed_smddp.zero.hooks\n", ":1: upstream must not import"),
        ("upstream/a.py", "def f():\n    from ..offload import window\n", ":2: upstream must not"),
        ("memory.py", "from deepspeed_smddp import zero\n", "base must not import"),
        ("offload/a.py", "from deepspeed_smddp.zero import hooks\n", "offload must not import"),
        ("strange/__init__.py", "", "'strange' is not a room"),
        # Private modules.
        ("offload/a.py", "from deepspeed.runtime import engine\n", ":1: names deepspeed.runtime"),
        ("memory.py", "import deepspeed\n\nx = deepspeed.runtime.zero.stage3\n", "memory.py:3"),
        ("zero/a.py", "import torch.distributed.fsdp._fully_shard as f\n", "only fsdp may name"),
    ],
)
def test_breach_in_python_is_found(tmp_path: Path, name: str, text: str, said: str) -> None:
    result = check_package(tmp_path, {name: text})
    assert result.returncode == 1
    assert said in result.stderr


def test_the_entries_may_import_any_room(tmp_path: Path) -> None:
    text = "def run() -> None:\n    from deepspeed_smddp.zero import hooks\n"
    assert check_package(tmp_path, {"cli.py": text}).returncode == 0
    assert check_package(tmp_path, {"backend.py": text}).returncode == 1


def test_import_cycle_in_the_benchmarks(tmp_path: Path) -> None:
    hosts = tmp_path / "benchmarks" / "hosts"
    hosts.mkdir(parents=True)
    (hosts / "__init__.py").write_text("")
    (hosts / "report.py").write_text("def draw():\n    from .inside import lines\n")
    (hosts / "inside.py").write_text("from hosts import record\n")
    (hosts / "record.py").write_text("")
    assert check(tmp_path, CLEAN).returncode == 0
    (hosts / "record.py").write_text("from hosts.report import draw\n")
    result = check(tmp_path, CLEAN)
    assert result.returncode == 1
    assert "hosts.inside -> hosts.record -> hosts.report -> hosts.inside" in result.stderr
