"""The examples as users run them, on models that train within seconds."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ranks
from harness.ports import free_port
from harness.training import Trainer

pytestmark = [
    pytest.mark.timeout(400, method="signal"),  # DeepSpeed may compile an operation first
]

EXAMPLES = ranks.ROOT / "examples"
STEPS = 20


def run(trainer: Trainer, size: int, script: str, data: Path, *arguments: str) -> str:
    """The output of rank 0."""
    given = ["--data", str(data), "--steps", str(STEPS), *arguments]
    answers = trainer.call(
        "harness.scripts:example", "A" * size, "smddp", script=script, arguments=given
    )
    return plain(answers[0]["printed"])


def launch(size: int, script: str, data: Path, *arguments: str) -> str:
    """The output of all ranks of torchrun."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"),
            *("--master-addr=127.0.0.1", f"--master-port={free_port()}"),
            *(str(EXAMPLES / script), "--data", str(data), "--steps", str(STEPS), *arguments),
        ],
        env=ranks.environment(FORCE_COLOR="1", SMDDP_FALLBACK="error"),
        cwd=data.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return plain(ended.stdout)


def plain(printed: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed)


def check(output: str) -> None:
    """The bar reaches the last step, and the model has learnt."""
    assert f"step {STEPS}/{STEPS}" in output and "━" in output
    losses = re.findall(r"loss ([0-9.]+)", output)
    final = re.search(rf"loss after {STEPS} steps: ([0-9.]+) nats per byte", output)
    assert final is not None, output[-3000:]
    # Equal guesses for all bytes cost ln 256 = 5.545.
    assert float(losses[0]) > 4.5 and float(final[1]) < 0.85 * float(losses[0])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(Path(textwrap.__file__).read_bytes() + Path(argparse.__file__).read_bytes())
    return path


SMALL = ("--seq-len", "32", "--batch", "4", "--hidden", "64")


def test_llama_fsdp2(trainer: Trainer, data: Path) -> None:
    saved = data.parent / "saved"
    more = ("--layers", "2", "--hybrid-shard-degree", "2", "--save", str(saved))
    output = run(trainer, 2, "llama_fsdp2.py", data, *SMALL, *more)
    check(output)
    assert float(re.search(r"gathered ([0-9.]+) MB", output)[1]) > 1  # type: ignore[index]
    assert (saved / ".metadata").exists()


def test_ddp(data: Path) -> None:
    check(launch(2, "ddp.py", data, *SMALL, "--accumulate", "2"))


def test_gpt2_sharded(trainer: Trainer, data: Path) -> None:
    saved = data.parent / "saved"
    more = ("--layers", "1", "--sharded-degree", "1", "--accumulate", "2", "--save", str(saved))
    check(run(trainer, 2, "gpt2_sharded.py", data, *SMALL, *more))
    assert (saved / "latest").exists()
