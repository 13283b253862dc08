"""Offloading, delayed initialisation and tensor parallelism with ZeRO-3 and FSDP2."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from harness import tensor_jobs
from harness.training import Trainer

pytestmark = pytest.mark.timeout(400, method="signal")  # at first DeepSpeed compiles an operation


def test_offloading_with_zero3_by_its_config(trainer: Trainer, tmp_path: Path) -> None:
    directory = os.fspath(tmp_path)
    check(trainer.call("harness.offload_jobs:zero3", "AB", "smddp", 240, directory=directory))
    assert list(tmp_path.iterdir()) == []


def test_offloading_with_fsdp2(trainer: Trainer) -> None:
    check(trainer.call("harness.offload_jobs:fsdp2", "AB", "smddp", 240))


def check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        without, *runs = answer["runs"]
        assert without["out"] == 0
        kinds = [None, {"use_reentrant": False}, {"use_reentrant": True}]
        assert [run["checkpointing"] for run in runs] == kinds
        for run in runs:
            assert run["state"] == without["state"], run
            assert run["losses"] == without["losses"]
            assert run["out"] > 0, run
            assert run["late"] == 0, run
            # The inputs of the layers in the window, and no more.
            assert (run["peak"] == run["window"]) == (run["checkpointing"] is not None), run


def test_delayed_values_on_three_ranks(trainer: Trainer) -> None:
    answers = trainer.call("harness.model_jobs:delayed", "AAB", "smddp", 240)
    for answer in answers:
        for name, digests in answer.items():
            for way, digest in digests.items():
                assert digest == digests["eager"], f"{name}, {way}"
        assert set(answer["gpt_neox"]) >= {"fsdp2", "zero3"}


@functools.cache
def one_process(name: str) -> list[list[float]]:
    return tensor_jobs.one_process(name)


def same_training(answers: list[dict[str, Any]]) -> None:
    """Steps on tensor-parallel 2 x data-parallel 2 ranks equal those of one process."""
    for answer in answers:
        for name in tensor_jobs.MODELS:
            losses, norms = one_process(name)
            assert losses[-1] < losses[0], "it learns"
            assert answer[name][0] == pytest.approx(losses, rel=1e-5), name
            assert len(losses) == tensor_jobs.STEPS[name]
            assert answer[name][1] == pytest.approx(norms, rel=1e-4), name


def test_tensor_parallel_with_fsdp2(trainer: Trainer) -> None:
    answers = trainer.call("harness.tensor_jobs:fsdp2", "AABB", "smddp", 300)
    same_training(answers)
    runs = [answer["dropout"] for answer in answers]
    for first, second in ((0, 1), (2, 3)):  # ranks of a tensor-parallel group
        one, other = runs[first]["kept"], runs[second]["kept"]
        for same in ("alike", "loss", "gradient", "after"):
            assert one[same] == other[same], same
        assert one["drawn inside"] != other["drawn inside"]
    assert runs[0]["kept"]["loss"] != runs[2]["kept"]["loss"]
    for run in runs:
        assert run["recomputed"] == run["kept"]
        assert run["kept"]["drawn again"] == run["kept"]["drawn inside"]


def test_tensor_parallel_with_zero3_by_its_config(trainer: Trainer) -> None:
    same_training(trainer.call("harness.tensor_jobs:zero3", "AABB", "smddp", 300))
