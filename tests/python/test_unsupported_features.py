"""Which features of a DeepSpeed config smddp does not carry out, by a sentence for each."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_smddp.deepspeed import comm_backend, hooks, unsupported_features
from deepspeed_smddp.upstream.wrapping import surround

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

    monkeypatch.setattr(hooks, "_accelerator_backend", lambda: "nccl")
    monkeypatch.setattr(comm_backend, "prepare", lambda request: None)
    called = surround(init_distributed, hooks.around_init_distributed)
    assert called(config={"comm_backend": "smddp"}) == "smddp"
    assert not caplog.text
    assert called("nccl", config={"comm_backend": "smddp"}) == "smddp"
    assert 'was called with "nccl", the accelerator\'s own; "comm_backend": "smddp"' in caplog.text
