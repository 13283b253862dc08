"""Programs of Hugging Face's libraries and of Lightning, started as their users start them.

``make hugging-face-check`` installs what these need beyond the tests' packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    by,
    check,
    launch,
    trainer_by,
    with_deepspeed,
)

pytestmark = pytest.mark.timeout(600, method="signal")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hugging-face"))


@pytest.fixture(scope="module")
def alone(place: Place) -> list[float]:
    """The ranks' losses of ``scripts/loop.py``, computed in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        parts = []
        for rank in range(RANKS):
            tokens = (torch.arange(16).view(1, 16) + step + rank) % 64
            parts.append(model(input_ids=tokens, labels=tokens).loss)
        torch.stack(parts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, part in enumerate(parts):
            losses[rank].append(part.item())
    return [*losses[0], *losses[1]]


def loop(place: Place) -> list[str]:
    return [str(SCRIPTS / "loop.py"), str(place.model), str(RATE), str(STEPS)]


def accelerator(place: Place, backend: str) -> list[str]:
    config = place.config(backend, train_micro_batch_size_per_gpu=1)
    return launch(*with_deepspeed(config), *loop(place))


def sft(place: Place, backend: str) -> list[str]:
    launcher = [f"--num_processes={RANKS}", f"--main_process_port={free_port()}"]
    launcher += with_deepspeed(place.trainers_config(backend))
    job = [f"--model_name_or_path={place.model}", f"--dataset_name={place.data}"]
    job += ["--max_length=48", "--bf16=false", "--activation_checkpointing=false"]
    return ["trl", "sft", *launcher, *job, *TRAINING, f"--output_dir={place.folder / 'sft'}"]


def dpo(place: Place, backend: str) -> list[str]:
    job = ["dpo.py", str(place.model), *TRAINING, "--bf16=false"]
    return by("accelerate", place.trainers_config(backend), *job)


def lora(place: Place, backend: str) -> list[str]:
    return trainer_by("accelerate", place, backend, "lora", "--gradient_checkpointing")


def vision(place: Place, backend: str) -> list[str]:
    optimizer = {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}}
    config = place.config(backend, train_micro_batch_size_per_gpu=1, optimizer=optimizer)
    return by("deepspeed", f"--deepspeed_config={config}", "vision.py", str(STEPS))


def lightning(place: Place, backend: str) -> list[str]:
    config = place.config(backend, train_micro_batch_size_per_gpu=2)
    job = [str(SCRIPTS / "lightning_module.py"), str(place.model), str(RATE), str(STEPS)]
    return ["python", *job, config, backend]


# Each with the library that it needs.
PROGRAMS: dict[str, tuple[str, Callable[[Place, str], list[str]]]] = {
    "trainer by torchrun": ("transformers", partial(trainer_by, "torchrun")),
    "trainer by deepspeed": ("transformers", partial(trainer_by, "deepspeed")),
    "trainer by accelerate": ("accelerate", partial(trainer_by, "accelerate")),
    "accelerator": ("accelerate", accelerator),
    "trl sft": ("trl", sft),
    "trl dpo": ("trl", dpo),
    "peft lora": ("peft", lora),
    "qwen vl": ("transformers", vision),
    "lightning": ("lightning", lightning),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_equal_those_over_gloo(place: Place, name: str) -> None:
    library, command = PROGRAMS[name]
    pytest.importorskip(library, reason=f"{library} isn't installed: make hugging-face-check does")
    check(place, command)


@pytest.mark.parametrize(("arguments", "own"), [(FSDP2, ZERO3), (["--multi_gpu"], {"all_reduce"})])
def test_accelerates_smddp_branch(
    place: Place, alone: list[float], arguments: list[str], own: set[str]
) -> None:
    answer = place.run(launch(*arguments, *loop(place)), **SAGEMAKER)
    assert answer.losses == pytest.approx(alone, rel=1e-4)
    assert answer.own >= own
