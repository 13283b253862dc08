"""Real runs of transformers' Trainer with ZeRO-3: the DeepSpeed config alone chooses the backend.

transformers makes the process group, through accelerate, while it builds ``TrainingArguments`` and
before it reads the DeepSpeed config; on the CPU it does so with Gloo and without DeepSpeed. The
short form of ``make hugging-face-check``.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests import hugging_face, jobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # DeepSpeed may compile its shared-memory operation first
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> hugging_face.Place:
    return hugging_face.Place(tmp_path_factory.mktemp("hugging-face"))


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_config_alone_chooses_smddp_and_losses_equal_those_over_gloo(
    place: hugging_face.Place, launcher: str
) -> None:
    hugging_face.check(place, partial(hugging_face.trainer_by, launcher))


def test_a_misspelt_backend_stops_training_arguments(place: hugging_face.Place) -> None:
    with pytest.raises(jobs.JobError):
        place.run(hugging_face.trainer_by("torchrun", place, "smdpp"))
    assert 'did you mean "smddp"? known: ' in (place.folder / "log").read_text()
