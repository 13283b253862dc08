"""The command line is there at once: its modules import torch only when a command runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
folder = str(Path(__file__).resolve().parents[2] / "deepspeed_smddp")
# The package's own __init__ registers the backend with torch; here it is left out.
PROGRAM = f"""
import sys, types
package = types.ModuleType("deepspeed_smddp")
package.__path__, package.__version__ = [{folder!r}], "1"
sys.modules["deepspeed_smddp"] = package
import deepspeed_smddp.commands.main
print([name for name in ("torch", "matplotlib", "deepspeed") if name in sys.modules])
"""


def test_the_commands_import_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
