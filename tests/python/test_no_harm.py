"""A job that does not choose smddp runs as without it, and an unknown DeepSpeed as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_smddp.deepspeed import auto, gather, monitoring, overlap, reduce
from harness.training import Trainer

pytest.importorskip("deepspeed")

# They read "comm_backend" and pass their arguments on.
READERS = ["Init.__init__", "init_distributed", "initialize"]
# What serves groups of smddp and their start in torch.
OF_TORCH = ["FileBaton.try_acquire", "FileBaton.wait", "split_group"]


def train(trainer: Trainer, backend: str, known: bool = True, **job: Any) -> dict[str, Any]:
    job = {"known": known, **job}
    return trainer.call("harness.no_harm_jobs:train", "AA", backend, **job)[0]


def told_of(result: dict[str, Any]) -> list[str]:
    return [sentence for sentence in result["said"] if "; the results are the same" in sentence]


def test_with_another_backend_only_what_reads_the_config_is_wrapped(trainer: Trainer) -> None:
    result = train(trainer, "gloo")
    assert result["wrapped"] == READERS
    assert not result["said"]


def test_an_unknown_deepspeed_costs_the_features_and_a_sentence_each(trainer: Trainer) -> None:
    known, unknown = train(trainer, "smddp"), train(trainer, "smddp", known=False)
    assert set(READERS) < set(known["wrapped"])
    assert unknown["wrapped"] == sorted(READERS + OF_TORCH)
    assert unknown["losses"] == known["losses"]
    assert not told_of(known)
    told = told_of(unknown)
    assert len(told) == 4
    for word in ("gathers", "reduces", "waits", "sizes"):
        assert sum(word in sentence.partition(", as ")[0] for sentence in told) == 1, word


def test_a_checkpoint_that_is_not_divided_anew_is_said_to_be_so(trainer: Trainer) -> None:
    sentence = "resumes only on as many ranks as wrote it"
    for known in (False, True):
        said = train(trainer, "smddp", known, version="0.19.9")["said"]
        assert any(sentence in one for one in said) != known


@pytest.mark.parametrize("before", ["smddp", "group"])
def test_gloo_after_and_beside_smddp_is_gloo_alone(trainer: Trainer, before: str) -> None:
    alone, later = (
        trainer.call("harness.no_harm_jobs:twice", "AA", "gloo", before=b)[0] for b in ("", before)
    )
    assert alone["told"], "the monitor wrote nothing"
    assert not alone["used"]
    assert later == alone


@pytest.mark.parametrize(
    "wrapper",
    [
        gather._convert,
        gather._gather_at_once,
        gather._remember_piece,
        reduce._reduce,
        overlap._add_gradient,
        overlap._reduce_bucket,
        overlap._end_backward,
        auto._fill_in,
        monitoring._step,
    ],
    ids=lambda wrapper: f"{wrapper.__module__.rpartition('.')[2]}.{wrapper.__name__}",
)
def test_wrappers_pass_what_they_do_not_know(wrapper: Callable[..., Any]) -> None:
    class Owner:
        all_gather_coalesced = None

        def get_partition_dp_group(self, param: Any) -> Any:
            return self

    owner = Owner()
    given = ((owner, owner, 1, 2, 3), {"new": 4})
    calls = []
    wrapper(lambda *args, **kwargs: calls.append((args, kwargs)), *given[0], **given[1])
    assert calls == [given]
