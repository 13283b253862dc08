"""tools/check_import_rules.py finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "check_import_rules.py"

CLEAN = {
    "common/status.h": "#pragma once\n",
    "transport/ofi/rail.cc": "#include <rdma/fabric.h>\nfi_info* info;\n",
    "kernels/reduction.h": "#pragma once\n",
    "device/cuda_device.cc": "#include <cuda.h>\nCUdeviceptr pointer; auto x = cuInit(0);\n",
    "device/host_device.h": '#include "kernels/reduction.h"\n',
    "intranode/copy_engine.cc": "auto x = cuMemcpyAsync(a, b, 1, s);\n",
    "progress/task.h": '// FI_EAGAIN is not an error\n#include "transport/ofi/rail.h"\n',
    "torch/module.cc": '#include <torch/extension.h>\n#include "progress/task.h"\nc10d::Work w;\n',
}


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(CHECK), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("collectives/a.cc", "#include <torch/types.h>\n", "torch/types.h; torch must not"),
        ("progress/a.cc", "int x;\nat::Tensor t;\n", "csrc/progress/a.cc:2: names at::Tensor"),
        ("torch/group.cc", "cudaStreamSynchronize(s);\n", "CUDA must not be named"),
        ("progress/a.cc", "#include <rdma/fi_endpoint.h>\n", "libfabric must not be named"),
        ("common/a.h", '#include "transport/ofi/rail.cc"\n', "rail.cc, but only its own files."),
        ("intranode/a.h", '#include "transport/ofi/rail.cc"\n', "but only common kernels device."),
        ("kernels/a.h", '#include "device/host_device.h"\n', "kernels/ must not include device/"),
        ("device/a.h", '#include "topology/t.h"\n', None),  # no such file: not ours
        ("common/status.h", '#include "status.h"\n', "include cycle common/status.h"),
        ("helpers/a.h", "int x;\n", "does not know the folder 'helpers'"),
        ("../tests/cpp/a_test.cc", "#include <torch/types.h>\n", "tests/cpp/a_test.cc:1"),
        # Words in comments and strings are no breach.
        ("progress/a.cc", '/* at::Tensor\n fi_send */ // cudaMalloc\n"fi_info; torch::x";\n', None),
    ],
)
def test_breach_is_found(tmp_path: Path, name: str, text: str, said: str | None) -> None:
    result = check(tmp_path, {**CLEAN, name: text})
    if said is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 1
        assert said in result.stderr


def test_cycle_of_three_files_and_two_modules_with_one_name(tmp_path: Path) -> None:
    files = {
        "common/a.h": '#include "common/b.h"\n',
        "common/b.h": '#include "c.h"\n',
        "common/c.h": '#include "common/a.h"\n',
    }
    modules = ("fsdp/model.py", "tuning/model.py", "compat/smdistributed/model.py")
    result = check(tmp_path, files | {f"../deepspeed_smddp/{name}": "" for name in modules})
    assert result.returncode == 1
    assert "common/a.h -> common/b.h -> common/c.h -> common/a.h" in result.stderr
    assert "fsdp/model.py, tuning/model.py: 2 modules have the name model" in result.stderr
