"""Features of DeepSpeed beside training by ZeRO: equal over smddp, or a sentence says how not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from deepspeed_smddp.deepspeed import comm_backend, unsupported_features, wrapped_calls
from deepspeed_smddp.upstream.wrapping import surround
from harness.training import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600, method="signal"),  # at first DeepSpeed compiles Muon's kernels
]

# The operations that smddp has to have carried out, and others that Gloo may have, too.
CASES: dict[str, tuple[set[str], set[str]]] = {
    "muon_2": ({"all_gather", "all_reduce"}, set()),
    "muon_3": ({"all_gather", "all_reduce"}, set()),
    "inference": ({"all_gather", "all_reduce"}, set()),
    "save_16bit": ({"all_gather", "reduce_scatter"}, set()),
    "quantized_gradients": ({"all_gather", "reduce_scatter"}, set()),  # one host: no all_to_all
}


class Answers:
    """What rank 0 found in each case; a layout and a backend run once, with all cases."""

    def __init__(self, trainer: Trainer) -> None:
        self.of = functools.cache(
            lambda layout, backend: trainer.call(
                "harness.feature_jobs:run", layout, backend, limit=550, cases=list(CASES)
            )[0]
        )


@pytest.fixture(scope="module")
def answers(trainer: Trainer) -> Answers:
    pytest.importorskip("deepspeed")
    return Answers(trainer)


@pytest.mark.parametrize("name", CASES)
def test_same_as_over_gloo(answers: Answers, name: str) -> None:
    wanted, got = (answers.of("AA", backend)[name] for backend in ("gloo", "smddp"))
    assert "found" in wanted, wanted.get("error")
    assert "found" in got, got.get("error")
    assert got["found"] == pytest.approx(wanted["found"], rel=2.0**-7)
    carried, forwarded = CASES[name]
    ours = {row.partition(" by ")[0] for row in got["operations"] if "fallback" not in row}
    theirs = {row.partition(" by ")[0] for row in got["operations"] if "fallback" in row}
    assert carried <= ours
    assert theirs <= forwarded, "Gloo carried out operations of smddp's"


def test_sentences_at_initialize(answers: Answers) -> None:
    def about(backend: str, name: str) -> list[str]:
        return [s for s in answers.of("AA", backend)[name]["said"] if s.startswith("smddp: with ")]

    said = about("smddp", "quantized_gradients")
    assert len(said) == 2
    assert '"compile.deepcompile", compiled graphs gather and reduce over an NCCL' in said[0]
    assert '"zero_optimization.zero_quantized_gradients", gradients travel by all_to_all' in said[1]
    assert not about("smddp", "save_16bit")
    assert not any(about("gloo", name) for name in CASES)


CONFIGS: dict[str, dict[str, Any]] = {
    "deepcompile": {"compile": {"deepcompile": True}},
    "deepep": {"expert_parallel": {"comm_backend": "deepep"}},
    "zero_quantized_weights": {"zero_optimization": {"zero_quantized_weights": True}},
    "zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    "super_offload": {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
    "1-bit": {"optimizer": {"type": "OneBitAdam"}},
}


@pytest.mark.parametrize("word", CONFIGS)
def test_a_config_that_asks_for_it(word: str) -> None:
    (sentence,) = unsupported_features.sentences(CONFIGS[word])
    assert word in sentence


def test_configs_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (
        {},
        {"compile": {"deepcompile": False}, "zero_optimization": {"stage": 3}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "zenflow": None}},
        {"optimizer": {"type": "AdamW"}, "expert_parallel": {"comm_backend": "comm"}},
    ):
        assert unsupported_features.sentences(config) == []
    monkeypatch.setenv("DS_SDMA_ALLGATHER", "1")
    (sentence,) = unsupported_features.sentences({})
    assert sentence == (
        "smddp: with DS_SDMA_ALLGATHER=1, DeepSpeed gathers over all ranks by mori where it finds "
        "it, past smddp"
    )


def test_a_backend_that_the_config_overrides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init_distributed(dist_backend: str | None = None, config: Any = None) -> str | None:
        return dist_backend

    monkeypatch.setattr(wrapped_calls, "_accelerator_backend", lambda: "nccl")
    monkeypatch.setattr(comm_backend, "prepare", lambda request: None)
    called = surround(init_distributed, wrapped_calls.around_init_distributed)
    assert called(config={"comm_backend": "smddp"}) == "smddp"
    assert not caplog.text
    assert called("nccl", config={"comm_backend": "smddp"}) == "smddp"
    assert 'was called with "nccl", the accelerator\'s own; "comm_backend": "smddp"' in caplog.text
