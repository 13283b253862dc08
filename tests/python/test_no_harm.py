"""A job that does not choose smddp runs as without it, and an unknown DeepSpeed as it is."""

from __future__ import annotations

from typing import Any

import pytest

from harness.training import Trainer

pytest.importorskip("deepspeed")

# They read "comm_backend" and pass their arguments on.
SEAM = ["Init.__init__", "init_distributed", "initialize"]
# A public function of torch's, of a process that has made a group of smddp.
SPLIT = ["split_group"]


def train(trainer: Trainer, backend: str, known: bool = True) -> dict[str, Any]:
    job = {"known": known}
    return trainer.call("harness.no_harm_jobs:train", "AA", backend, **job)[0]


def told_of(result: dict[str, Any]) -> list[str]:
    return [sentence for sentence in result["said"] if "is not one this package knows" in sentence]


def test_other_backends_find_deepspeed_as_it_is(trainer: Trainer) -> None:
    result = train(trainer, "gloo")
    assert result["wrapped"] == SEAM
    assert not result["said"]


def test_an_unknown_deepspeed_costs_the_features_and_a_sentence_each(trainer: Trainer) -> None:
    known, unknown = train(trainer, "smddp"), train(trainer, "smddp", known=False)
    assert set(SEAM) < set(known["wrapped"])
    assert unknown["wrapped"] == SEAM + SPLIT
    assert unknown["losses"] == known["losses"]
    assert not told_of(known)
    told = told_of(unknown)
    assert len(told) == 4
    for word in ("gathers", "reduces", "waits", "sizes"):
        assert sum(word in sentence.partition(", as ")[0] for sentence in told) == 1, word
