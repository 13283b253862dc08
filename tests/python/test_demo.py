"""The demo: launched by deepspeed as its users do, interrupted, resumed; and its parts."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from harness.ports import free_port
from harness.training import Trainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE = 240  # seconds; in the first run DeepSpeed compiles an operation
# Seconds of a whole run; two cores without bf16 instructions take 170 for the steps of `make demo`.
SLOW_CORES = 600
STEPS = 40

sys.path.insert(0, str(EXAMPLES))
import byte_text  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text and a config for a model that trains within seconds."""
    directory = tmp_path_factory.mktemp("demo")
    source = Path(textwrap.__file__).read_bytes() + Path(argparse.__file__).read_bytes()
    (directory / "text.txt").write_bytes(source)
    config = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    kept["PATH"] = str(Path(sys.executable).parent) + os.pathsep + kept["PATH"]
    kept.update(
        DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
    )
    kept["SMDDP_FALLBACK"] = "error"  # nothing may go to the fallback
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        kept.pop(name, None)
    return kept


def demo_arguments(files: Path, output: Path) -> list[str]:
    return [
        *("--deepspeed_config", str(files / "config.json")),
        *("--data", str(files / "text.txt"), "--output", str(output)),
        *("--steps", str(STEPS), "--layers", "1", "--hidden", "64", "--seq-len", "32"),
        "--no-progress",
    ]


def start(command: list[str]) -> subprocess.Popen[str]:
    # A session of its own: like Ctrl-C, a signal to the group reaches the launcher and the ranks.
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the demo did not end within {DEADLINE} s:\n{output[-4000:]}")
    return output


def launch(files: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    return start(
        [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *("--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())),
            str(EXAMPLES / "train.py"),
            *demo_arguments(files, output),
            *more,
        ]
    )


def losses(output: Path) -> list[tuple[int, float, str]]:
    with (output / "losses.csv").open(newline="") as f:
        return [(int(r["step"]), float(r["loss"]), r["held_out"]) for r in csv.DictReader(f)]


def run(trainer: Trainer, *arguments: str) -> str:
    """The output of rank 0 of two ranks, forked from a process that has imported DeepSpeed."""
    answers = trainer.call(
        "harness.scripts:example", "AA", "smddp", SLOW_CORES, script="train.py", arguments=arguments
    )
    printed: str = answers[0]["printed"]
    return printed


@pytest.fixture(scope="module")
def straight(trainer: Trainer, files: Path) -> Path:
    """An uninterrupted run."""
    output = files / "straight"
    assert "final loss" in run(trainer, *demo_arguments(files, output))
    return output


@pytest.mark.timeout(DEADLINE + 60)
def test_run_writes_losses_curve_and_summary(straight: Path) -> None:
    rows = losses(straight)
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    assert rows[-1][1] < rows[0][1]
    assert rows[-1][2] != "", "the last step has a held-out loss"
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["backend"] == "smddp" and summary["sharded_bytes_on_fallback"] == 0
    assert sum(row["bytes"] for row in summary["statistics_of_rank_0"]) > 0


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE + 60)
def test_interrupted_and_resumed_run_has_the_same_losses(files: Path, straight: Path) -> None:
    output = files / "interrupted"
    process = launch(files, output)
    assert process.stdout is not None
    begun = time.monotonic()
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step    4/"):
            break
        assert time.monotonic() - begun < DEADLINE, said
    os.killpg(process.pid, signal.SIGINT)
    said += finish(process)
    assert "--resume" in said, said
    done = len(losses(output))
    assert 4 <= done < STEPS, said

    process = launch(files, output, "--resume")
    said = finish(process)
    assert process.returncode == 0, said
    assert f"resuming after step {done}" in said
    assert losses(output) == losses(straight)


@pytest.mark.rare
def test_a_processor_without_bf16_instructions_trains_in_fp32(
    trainer: Trainer, files: Path, straight: Path
) -> None:
    output = files / "fp32"
    arguments = (*demo_arguments(files, output), "--steps", "4")
    job = "harness.scripts:example_without_bf16"
    answers = trainer.call(job, "AA", "smddp", SLOW_CORES, script="train.py", arguments=arguments)
    assert "no instructions: trained in fp32" in answers[0]["printed"]
    pairs = zip(losses(output), losses(straight), strict=False)
    differences = [abs(one - other) for (_, one, _), (_, other, _) in pairs]
    assert 0 < max(differences) < 0.1


@pytest.mark.timeout(DEADLINE + 60)
def test_two_hosts_have_the_same_losses(files: Path, straight: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("examples/two_hosts.sh needs bash")
    output = files / "two-hosts"
    process = start(
        ["bash", str(EXAMPLES / "two_hosts.sh"), *demo_arguments(files, output)],
    )
    said = finish(process)
    assert process.returncode == 0, said
    assert losses(output) == losses(straight)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["sharded_bytes_on_fallback"] == 0


@pytest.mark.timeout(120)
def test_mistake_is_one_sentence(files: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "train.py")),
            *("--deepspeed_config", str(files / "config.json"), "--hidden", "100"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("train.py: ") and "--hidden must be a multiple of 64, not 100." in last
    assert "Traceback" not in result.stderr


def test_windows_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40)
    text = byte_text.load(tmp_path / "a", 1 << 20, 33)
    whole = byte_text.training_batch(text, 1, 7, 8, 0, 33, 8)
    halves = [byte_text.training_batch(text, 1, 7, 4, first, 33, 8) for first in (0, 4)]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, byte_text.training_batch(text, 1, 8, 8, 0, 33, 8))
    assert not torch.equal(whole, byte_text.training_batch(text, 2, 7, 8, 0, 33, 8))
