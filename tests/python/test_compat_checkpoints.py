"""Files that ``smp.load`` and ``smp.resume_from_checkpoint`` read do not run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_smddp.compat import checkpoints, modelparallel

pytestmark = pytest.mark.quick


class Evil:
    """Pickled, it makes a file when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


class Model:
    loaded: dict[str, torch.Tensor] | None = None

    def load_state_dict(self, parameters: dict[str, torch.Tensor], strict: bool) -> None:
        assert strict
        self.loaded = parameters


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    monkeypatch.setattr(modelparallel.state, "model", made, raising=False)
    monkeypatch.setattr(modelparallel, "rank", lambda: 0)
    return made


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, model: Model) -> None:
    torch.save({"model": {}, "user_content": Evil(tmp_path / "made")}, tmp_path / "full.pt")
    torch.save(Evil(tmp_path / "made"), tmp_path / "thing_0")
    with pytest.raises(pickle.UnpicklingError, match=r"full\.pt .*add_safe_globals"):
        checkpoints.resume_from_checkpoint(str(tmp_path), tag="full.pt", partial=False)
    with pytest.raises(pickle.UnpicklingError, match=r"thing_0 .*add_safe_globals"):
        checkpoints.load(str(tmp_path / "thing"))
    assert not (tmp_path / "made").exists()
    assert model.loaded is None


def test_tensors_numbers_and_containers_are_read(tmp_path: Path, model: Model) -> None:
    content = {"model": {"w": torch.ones(3)}, "user_content": {"step": 7, "names": ["a", (1.5,)]}}
    torch.save(content, tmp_path / "full.pt")
    read = checkpoints.resume_from_checkpoint(str(tmp_path), tag="full.pt", partial=False)
    assert read == content["user_content"]
    assert model.loaded is not None
    assert torch.equal(model.loaded["w"], torch.ones(3))
    torch.save(content["user_content"], tmp_path / "thing_0")
    assert checkpoints.load(str(tmp_path / "thing")) == content["user_content"]
