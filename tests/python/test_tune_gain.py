"""The gain that ``smddp tune`` expects: the simulated step alone, and beside real steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ranks
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tuning import auto_keys, decoder
from deepspeed_smddp.tuning.choice import Choice, NetworkModel, Point
from deepspeed_smddp.tuning.expected_step import ModuleCost, StepKind, step_seconds
from deepspeed_smddp.tuning.tune_job import better

KEPT = Choice(0, 0, 50_000_000, 0, 500_000_000)  # all is prefetched, nothing persists


def network(latency: float, rate: float) -> NetworkModel:
    points = tuple(Point(4096 << 2 * i, latency + (4096 << 2 * i) / rate) for i in range(7))
    return NetworkModel(points, points)


def step(modules: list[ModuleCost], sizes: Choice, rate: float = 1e9, **changes: Any) -> float:
    kind = StepKind(network(1e-4, rate), modules, 2, **{"element_size": 2, **changes})
    return step_seconds(kind, sizes)


def modules(count: int, elements: int, forward: float, backward: float) -> list[ModuleCost]:
    return [ModuleCost([elements], forward, backward) for _ in range(count)]


def test_without_prefetch_every_gather_is_waited_for() -> None:
    # A gather or a reduction of 2 MB takes 2.1 ms. No parameter is kept. In the backward pass a
    # gather that was not started ahead also waits for the reduction before it.
    load = modules(10, 1_000_000, 0.01, 0.02)
    waiting = step(load, replace(KEPT, stage3_prefetch_bucket_size=0), max_reuse=0)
    ahead = step(load, replace(KEPT, stage3_prefetch_bucket_size=2_000_000), max_reuse=0)
    assert waiting - ahead == pytest.approx((10 + 2 * 9) * 2.1e-3, rel=0.02)
    # The first gather and the last reduction can't be hidden.
    assert ahead == pytest.approx(0.3 + 2 * 2.1e-3, rel=0.02)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(0, 10**7), st.integers(1, 10**8))
def test_a_faster_network_is_never_slower(
    latency: float, rate: float, prefetch: int, reduce: int
) -> None:
    sizes = replace(KEPT, stage3_prefetch_bucket_size=prefetch, reduce_bucket_size=reduce)
    load = decoder.module_costs(decoder.DecoderSizes(), 0.02, 0.04)
    slow, fast = (
        step_seconds(StepKind(network(latency, r), load, 4, max_reuse=0), sizes)
        for r in (rate, 2 * rate)
    )
    assert 0.06 <= fast <= slow * (1 + 1e-9)


def test_the_modules_hold_the_decoders_parameters() -> None:
    sizes = decoder.of_text("layers=2,hidden=64,heads=4,vocabulary=50,sequence=8")
    model = decoder.Decoder(sizes)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    costs = decoder.module_costs(sizes, 1.0, 2.0)
    assert sum(c.forward for c in costs) == pytest.approx(1.0)
    assert sum(c.backward for c in costs) == pytest.approx(2.0)
    assert model(decoder.tokens(sizes, 3, 0)).item() == pytest.approx(4.0, abs=0.7)  # ln 50


@pytest.mark.parametrize("text", ["depth=3", "layers=0", "layers=two", "hidden=65", "layers"])
def test_a_wrong_model_is_refused(text: str) -> None:
    with pytest.raises(SmddpConfigError, match="--model"):
        decoder.of_text(text)


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": "auto",
        "overlap_comm": True,
    },
}


def test_what_is_stated_and_what_is_open() -> None:
    before = auto_keys.stated(CONFIG)
    assert before == Choice(0, 0, 0, 100_000, 500_000_000)
    assert len(auto_keys.open_keys(CONFIG)) == 4
    bare = auto_keys.without_sizes(CONFIG)
    assert len(auto_keys.open_keys(bare)) == 5
    assert auto_keys.open_keys(auto_keys.set_all(CONFIG, before)) == []
    assert auto_keys.stated(auto_keys.set_all(CONFIG, before)).reduce_bucket_size == 500_000_000
    with pytest.raises(SmddpConfigError, match="reduce_bucket_size"):
        auto_keys.stated({"zero_optimization": {"stage": 3, "reduce_bucket_size": "many"}})


@pytest.mark.parametrize(
    ("after_ms", "kept"), [(90, False), (99, False), (99.5, True), (120, True)]
)
def test_sizes_that_save_nothing_are_not_taken(after_ms: float, kept: bool) -> None:
    chosen = replace(KEPT, reduce_bucket_size=1, why={"reduce_bucket_size": "the network"})
    sizes, (before, after) = better(KEPT, chosen, (100.0, after_ms))
    assert sizes.reduce_bucket_size == (KEPT if kept else chosen).reduce_bucket_size
    assert (before, after) == (100.0, 100.0 if kept else after_ms)
    assert ("kept" in sizes.why["reduce_bucket_size"]) == kept


TUNE = """
import sys
from deepspeed_smddp.commands import main as cli
"""


@pytest.mark.slow
def test_check_runs_real_steps_before_and_after(tmp_path: Path) -> None:
    given_, written, told = (tmp_path / name for name in ("ds.json", "tuned.json", "gain.json"))
    given_.write_text(json.dumps(CONFIG))
    words = ["smddp", "tune", "--ds-config", str(given_), "--write", str(written), "--all"]
    words += ["--json", str(told), "--check", "--turns", "2", "--steps", "1"]
    words += ["--model", "layers=2,hidden=64,heads=4,sequence=16"]
    program = f"""
    sys.argv = {words!r}
    try:
        cli.main()
    except SystemExit as ended:
        assert ended.code == 0, ended.code
    """
    output, *_ = ranks.run(
        program, 2, timeout=240, imports=TUNE, env={"XDG_CACHE_HOME": str(tmp_path)}
    )
    assert "expected" in output and "measured" in output and "of 2 turns" in output
    zero = json.loads(written.read_text())["zero_optimization"]
    found = json.loads(told.read_text())
    keys = found["keys"]
    assert keys["stage3_prefetch_bucket_size"]["before"] == 0
    after = zero["stage3_prefetch_bucket_size"]
    assert after == keys["stage3_prefetch_bucket_size"]["after"]
    # Inside a host prefetching may save less than it takes to be chosen.
    assert (after > 0) == (found["expected"]["gain"] > 0)
    for times in (found["expected"], found["measured"]):
        assert times["gain"] == pytest.approx(1 - times["after"] / times["before"])
    assert len(found["measured"]["turns_before"]) == len(found["measured"]["turns_after"]) == 2
