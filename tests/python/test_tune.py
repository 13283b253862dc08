"""The value of "auto": the choice from synthetic curves, configs, the cache, real measurements."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deepspeed_smddp.commands.main import app
from deepspeed_smddp.tuning import auto_keys, cache, measure
from deepspeed_smddp.tuning.choice import (
    LARGEST_PIECE,
    SMALLEST_BUCKET,
    Choice,
    NetworkModel,
    Point,
    choose,
)

SIZES = [4096 << (2 * i) for i in range(7)]


def line(latency: float, rate: float, sizes: list[int] = SIZES) -> tuple[Point, ...]:
    """Hockney's model: latency in seconds, rate in bytes per second."""
    return tuple(Point(size, latency + size / rate) for size in sizes)


def chosen(latency: float, rate: float, element_size: int = 2) -> Choice:
    return choose(NetworkModel(line(latency, rate), line(latency, rate)), element_size)


latencies = st.floats(1e-6, 1e-2)
rates = st.floats(1e6, 1e12)


@given(latencies, rates, st.floats(1, 100))
def test_a_higher_latency_never_gives_smaller_pieces(
    latency: float, rate: float, by: float
) -> None:
    quick, slow = chosen(latency, rate), chosen(latency * by, rate)
    assert slow.allgather_bucket_size >= quick.allgather_bucket_size
    assert slow.reduce_bucket_size >= quick.reduce_bucket_size


@given(latencies, rates, st.sampled_from([2, 4]))
def test_deepspeed_accepts_every_choice(latency: float, rate: float, element_size: int) -> None:
    choice = chosen(latency, rate, element_size)
    assert choice.allgather_bucket_size >= SMALLEST_BUCKET
    assert choice.reduce_scatter_bucket_size == 0, "on these curves, a longer piece is never slower"
    assert 0 < choice.stage3_prefetch_bucket_size <= 50_000_000
    assert 0 <= choice.stage3_param_persistence_threshold <= 100_000
    assert choice.reduce_bucket_size > 0
    assert set(choice.why) == {*auto_keys.SMDDP_KEYS, *auto_keys.ZERO_KEYS}


def test_on_gpus_pieces_are_short() -> None:
    latency, rate = 100e-6, 125e6
    model = NetworkModel(line(latency, rate), line(latency, rate))
    bucket = choose(model, on_gpu=True).allgather_bucket_size
    assert bucket == 256 << 10  # the shortest that has 0.9 of the rate
    assert bucket < choose(model).allgather_bucket_size


def test_a_high_latency_gives_longer_pieces() -> None:
    choice = chosen(10e-3, 1e9)  # 0.9 of the rate at 86 MiB: 16 MiB is the largest measured
    assert choice.allgather_bucket_size == choice.reduce_bucket_size * 2 // 4 == SIZES[-1]


def test_sizes_in_elements_depend_on_the_element_size() -> None:
    narrow, wide = chosen(50e-6, 1e9, 2), chosen(50e-6, 1e9, 4)
    assert wide.allgather_bucket_size == narrow.allgather_bucket_size, "bytes"
    assert wide.stage3_prefetch_bucket_size == narrow.stage3_prefetch_bucket_size // 2
    assert wide.reduce_bucket_size == narrow.reduce_bucket_size // 2


def test_reductions_are_cut_if_long_ones_exceed_the_caches() -> None:
    hump = (
        *line(5e-6, 9e9, SIZES[:-1]),
        Point(SIZES[-1], SIZES[-1] / 4e9),
    )
    choice = choose(NetworkModel(hump, hump))
    assert choice.reduce_scatter_bucket_size == choice.allgather_bucket_size == LARGEST_PIECE
    assert "4 GB/s at 16 MiB" in choice.why["reduce_scatter_bucket_size"]


@pytest.mark.parametrize(("by", "kept"), [([9, 9, 3, 1], True), ([9, 9, 9, 9], False)])
def test_a_busy_machine_is_no_other_network(by: list[float], kept: bool) -> None:
    model = NetworkModel(line(50e-6, 1e9), line(50e-6, 1e9))
    middle = model.allgather[3]
    times = iter(by)
    assert measure.holds(model, lambda size: middle.seconds * next(times)) == kept


CHOICE = Choice(1 << 20, 0, 2_000_000, 5000, 3_000_000, {})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_leave_nothing_open(stage: int) -> None:
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}
    assert auto_keys.open_keys(config) == []
    assert auto_keys.fill(config, CHOICE) == config


def test_absent_and_auto_are_filled_in_and_the_rest_stays() -> None:
    config: dict[str, Any] = {
        "smddp": {"allgather_bucket_size": "auto", "fallback": "error"},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 77,
            "overlap_comm": True,
        },
    }
    before = json.dumps(config)
    filled = auto_keys.fill(config, CHOICE)
    assert json.dumps(config) == before, "the caller's config was changed"
    assert filled["smddp"] == {
        "allgather_bucket_size": 1 << 20,
        "reduce_scatter_bucket_size": "auto",
        "fallback": "error",
    }
    assert filled["zero_optimization"] == {
        "stage": 3,
        "stage3_prefetch_bucket_size": 2_000_000,
        "stage3_param_persistence_threshold": 77,
        "reduce_bucket_size": 3_000_000,
        "overlap_comm": True,
    }


def test_explicit_values_win_under_deepspeeds_second_names() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 5, "param_persistence_threshold": "auto"}
    filled = auto_keys.fill_zero({"zero_optimization": zero}, CHOICE)["zero_optimization"]
    assert filled == {
        "stage": 3,
        "prefetch_bucket_size": 5,
        "stage3_param_persistence_threshold": 5000,
        "reduce_bucket_size": 3_000_000,
    }


def test_small_operations_are_timed_in_rows_that_no_burst_carries() -> None:
    # 1 MiB where the network is fast enough for it, else 5 ms.
    assert [measure.in_a_row(size, 1e-5) for size in (4096, 65536, 1 << 20, 16 << 20)] == [
        *(256, 16, 1, 1)
    ]
    assert measure.in_a_row(65536, 1e-3) == 5 and measure.in_a_row(262144, 0.1) == 1


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    curve = NetworkModel(line(1e-5, 1e9), line(2e-5, 1e9))
    name = cache.topology("0", ["a", "a", "b"])
    assert cache.load(name, cache.NETWORK) is None
    cache.store(name, curve, cache.NETWORK)
    assert cache.load(name, cache.NETWORK) == curve
    assert len(list(cache.directory().iterdir())) == 1
    assert name != cache.topology("0", ["a", "b", "b"])
    with monkeypatch.context() as uncoded:
        uncoded.setenv("SMDDP_CODING", "off")
        assert name != cache.topology("0", ["a", "a", "b"])
    monkeypatch.setenv("SMDDP_FABRIC_INTERFACE", "eth7")
    assert name != cache.topology("0", ["a", "a", "b"])
    (cache.directory() / f"{name}.json").write_text('{"allgather": []}')
    assert cache.load(name, cache.NETWORK) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
_POINTS = st.lists(
    st.fixed_dictionaries({"size": st.integers(-1, 1 << 70), "seconds": st.floats()})
    | st.fixed_dictionaries({"size": st.integers(1, 1 << 27), "seconds": st.floats(1e-9, 1e4)})
    | _JSON,
    max_size=70,
)
_CURVES = st.fixed_dictionaries({"allgather": _POINTS, "reduce_scatter": _POINTS})


@given(text=st.binary(max_size=200) | (_CURVES | _JSON).map(lambda o: json.dumps(o).encode()))
def test_any_file_in_the_cache_is_a_curve_within_bounds_or_none(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "any"))
        cache.directory().mkdir(parents=True, exist_ok=True)
        (cache.directory() / "any.json").write_bytes(text)
        found = cache.load("any", cache.NETWORK)
    for curve in () if found is None else (found.allgather, found.reduce_scatter):
        sizes = [point.size for point in curve]
        assert sizes == sorted(set(sizes))
        assert 2 <= len(sizes) <= 64
        assert sizes[0] > 0
        assert sizes[-1] <= 256 << 20
        assert all(0 < point.seconds <= 3600 for point in curve)


def test_cache_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store("name", NetworkModel(line(1e-5, 1e9), line(1e-5, 1e9)), cache.NETWORK)
    assert list(cache.directory().iterdir()) == []


@pytest.mark.parametrize("option", ["--write", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, option: str
) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 3}}')
    words = ["tune", "--ds-config", str(config), option, str(tmp_path / "none" / "tuned.json")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 2
    assert "there is no folder" in answer.output + (answer.stderr if answer.stderr_bytes else "")
