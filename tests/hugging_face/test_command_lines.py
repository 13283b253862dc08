"""Trainer, accelerate and TRL from their own command lines: over smddp as over Gloo.

``make hugging-face-check`` installs what these need beyond the tests' packages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.ports import free_port
from tests.hugging_face import (
    FSDP2,
    RANKS,
    RATE,
    SAGEMAKER,
    SCRIPTS,
    STEPS,
    TRAINING,
    ZERO3,
    Place,
    check_trainer,
    launch,
    with_deepspeed,
)

pytestmark = pytest.mark.timeout(600, method="signal")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hugging-face"))


@pytest.fixture(scope="module")
def alone(place: Place) -> list[float]:
    """Rank 0's losses of ``scripts/loop.py``, computed in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        parts = []
        for rank in range(RANKS):
            tokens = (torch.arange(16).view(1, 16) + step + rank) % 64
            parts.append(model(input_ids=tokens, labels=tokens).loss)
        torch.stack(parts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[0].item())
    return losses


def loop(place: Place) -> list[str]:
    return [str(SCRIPTS / "loop.py"), str(place.model), str(RATE), str(STEPS)]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_trainer(place: Place, launcher: str) -> None:
    check_trainer(place, launcher)


def test_accelerate_with_a_deepspeed_config(place: Place) -> None:
    # Without GPUs accelerate itself counts one process; DeepSpeed counts and trains on all.
    ours, theirs = (
        place.run(
            launch(
                *with_deepspeed(place.config(backend, train_micro_batch_size_per_gpu=1)),
                *loop(place),
            )
        )
        for backend in ("smddp", "gloo")
    )
    assert len(ours.losses) == RANKS * STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.own >= ZERO3


@pytest.mark.parametrize(("arguments", "own"), [(FSDP2, ZERO3), (["--multi_gpu"], {"all_reduce"})])
def test_accelerates_smddp_branch(
    place: Place, alone: list[float], arguments: list[str], own: set[str]
) -> None:
    answer = place.run(launch(*arguments, *loop(place)), **SAGEMAKER)
    assert answer.losses == pytest.approx(alone, rel=1e-4)
    assert answer.own >= own


def test_trl_sft(place: Place, tmp_path: Path) -> None:
    pytest.importorskip("trl")

    def command(backend: str) -> list[str]:
        port = f"--main_process_port={free_port()}"
        launcher = [f"--num_processes={RANKS}", port]
        launcher += with_deepspeed(place.trainers_config(backend))
        job = [f"--model_name_or_path={place.model}", f"--dataset_name={place.data}"]
        job += ["--max_length=48", "--bf16=false", "--activation_checkpointing=false"]
        return ["trl", "sft", *launcher, *job, *TRAINING, f"--output_dir={tmp_path}"]

    ours, theirs = (place.run(command(backend)) for backend in ("smddp", "gloo"))
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-3)
    assert ours.losses[-1] < 0.9 * ours.losses[0]
    assert ours.own >= ZERO3
