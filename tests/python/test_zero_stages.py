"""ZeRO and its features give the same losses over smddp as over Gloo.

Those that ``test_zero_gather`` compares with DeepSpeed's own paths are not repeated here.

One process forks the ranks of a world once per layout and backend. All cases run there one after
another, so that each case also runs after other engines in the same process.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from harness.training import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600, method="signal"),  # at first DeepSpeed compiles operations
]

# On two ranks of one host.
TWO = [
    "stage_1",
    "stage_1_round_robin_bf16",
    "stage_2",
    "accumulation",
    "leaf_modules",
    "several_engines",
    "compiled",
    "offload_to_cpu",
    "qgz",
    "moe",
    "ulysses",
    "muon_2",
    "muon_3",
    "inference",
    "save_16bit",
    "autotp",  # leaves DeepSpeed with groups that no other case can train on
]
# On two hosts of two ranks each.
FOUR = ["stage_2", "stage_3", "hpz", "several_engines", "model_parallel"]
# On every layout: hosts x ranks of 1x2, 2x2, 3x1.
EVERYWHERE = ["gpt_neox", "gpt_neox_bf16"]
BF16 = ("gpt_neox_bf16", "stage_1_round_robin_bf16", "hpz", "qgz", "moe", "muon_2", "muon_3")
BF16 += ("save_16bit",)
# Not losses: nothing is trained, or the last value is a sum over what was saved.
NOT_TRAINED = ("inference", "save_16bit")


class Worlds:
    """Answers of rank 0, by case; a layout and a backend run once, with all their cases."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.of = functools.cache(self._run)

    def _run(self, layout: str, backend: str, everywhere: bool = False) -> dict[str, Any]:
        cases = TWO if len(layout) == 2 else FOUR
        cases = EVERYWHERE if everywhere else cases
        results = self._trainer.call("harness.zero:run", layout, backend, limit=550, cases=cases)
        for result in results:
            for name, answer in result["answers"].items():
                first = results[0]["answers"][name]
                assert answer.get("losses") == first.get("losses"), "ranks report different losses"
        answers: dict[str, Any] = results[0]["answers"]
        return answers


@pytest.fixture(scope="module")
def worlds(trainer: Trainer) -> Worlds:
    return Worlds(trainer)


def check(name: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert "losses" in wanted, f"fails over gloo: {wanted['error']}"
    assert "losses" in got, got["error"]
    if name not in NOT_TRAINED:
        assert got["losses"][-1] < got["losses"][0], "nothing was learnt"
    assert not got["forwarded"], "Gloo carried out operations of smddp's"
    # bf16 rounds after sums in another order; the other cases are fp32.
    tolerance = 2.0**-7 if name in BF16 else 1e-6
    assert got["losses"] == pytest.approx(wanted["losses"], rel=tolerance)


@pytest.mark.parametrize("layout", ["AA", "AABB", "ABC"])
def test_every_layout(worlds: Worlds, layout: str) -> None:
    wanted = worlds.of("A" * len(layout), "gloo", True)
    for name, got in worlds.of(layout, "smddp", True).items():
        check(name, got, wanted[name])
        assert set(got["carried"]) >= {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.rare
@pytest.mark.parametrize("name", TWO)
def test_two_ranks(worlds: Worlds, name: str) -> None:
    check(name, worlds.of("AA", "smddp")[name], worlds.of("AA", "gloo")[name])


@pytest.mark.rare
@pytest.mark.parametrize("name", FOUR)
def test_two_hosts_of_two_ranks(worlds: Worlds, name: str) -> None:
    check(name, worlds.of("AABB", "smddp")[name], worlds.of("AABB", "gloo")[name])


@pytest.mark.rare
def test_a_feature_whose_operations_differ_is_said_to_do_so(worlds: Worlds) -> None:
    def said(name: str, backend: str = "smddp") -> list[str]:
        every = worlds.of("AA", backend)[name]["said"]
        return [sentence for sentence in every if sentence.startswith("smddp: with ")]

    (sentence,) = said("qgz")
    assert '"zero_optimization.zero_quantized_gradients", gradients travel by' in sentence
    assert not said("save_16bit") and not said("qgz", "gloo")
