"""Extension points that DeepSpeed may get (docs/dev/upstream.md) are used in place of wrapping."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_smddp.deepspeed import comm_backend, default_group
from deepspeed_smddp.upstream import seams
from deepspeed_smddp.upstream.wrapping import surround
from harness.training import Trainer

deepspeed = pytest.importorskip("deepspeed")
ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_every_module_that_wraps() -> None:
    package = ROOT / "deepspeed_smddp"
    page = (ROOT / "docs" / "dev" / "upstream.md").read_text()
    wraps = re.compile(r"(?<!text)(?<!def )\b(wrapping\.)?(wrap|surround|replaced)\(")
    found = {
        path.relative_to(package)
        for path in package.rglob("*.py")
        if wraps.search(path.read_text().replace("textwrap.wrap(", ""))
    }
    found.discard(Path("upstream/wrapping.py"))
    assert len(found) > 8
    for path in found:
        assert f"`{path}`" in page or f"`{path.parent}/`" in page, path


def test_known_versions_have_none() -> None:
    assert [name for name in seams.SEAMS if seams.find(name)] == []


@pytest.mark.parametrize("other", [3, lambda: None, lambda settings: None])
def test_another_signature_is_none(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    monkeypatch.setattr(deepspeed.comm, "backend_of_config", other, raising=False)
    monkeypatch.setattr(deepspeed.zero, "set_parameter_gatherer", other, raising=False)
    assert [name for name in seams.SEAMS if seams.find(name)] == []


@pytest.mark.parametrize(
    ("read", "config", "passed"),
    [
        (lambda config: config["comm_backend"], {"comm_backend": "smddp"}, None),
        (lambda config: None, {"comm_backend": "smddp"}, "smddp"),  # it looks elsewhere
        (lambda config: config["comm_backend"], None, "nccl"),  # no config at all
    ],
)
def test_deepspeed_reads_the_backend_itself(
    monkeypatch: pytest.MonkeyPatch, read: Any, config: Any, passed: str | None
) -> None:
    def init_distributed(dist_backend: str | None = None, config: Any = None) -> str | None:
        return dist_backend

    prepared = []
    monkeypatch.setattr(deepspeed.comm, "backend_of_config", read, raising=False)
    monkeypatch.setattr(comm_backend, "prepare", prepared.append)
    called = surround(init_distributed, [default_group.around_init_distributed])
    given = None if config else "nccl"
    assert called(given, config=config) == passed
    assert len(prepared) == (1 if config else 0)


@pytest.mark.parametrize("known", [True, False])  # a version that has the seam is a new one
def test_the_gatherer_is_handed_over(trainer: Trainer, known: bool) -> None:
    for answer in trainer.call("harness.seam_jobs:gather", "AB", "smddp", known=known):
        assert answer["ours"] == [True]
        assert set(answer["released"]) == {0}
        assert answer["same"]
        assert answer["refused"]
        assert not answer["wrapped"]
