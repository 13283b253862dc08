"""The arithmetic of the benchmarks: builds compared in turns, bytes that can be hidden, peers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def hiding() -> Any:
    from steps import hiding

    return hiding


def hideable(
    hiding: Any, ready: list[float], sizes: list[int], last: list[float], hosts: int = 2
) -> float:
    nothing = [0.0] * len(last)
    step = hiding.Step(ready, nothing, last, nothing, nothing)
    ceiling = 1e6  # bytes per second: 1000 a millisecond
    return float(hiding.Trace(sizes, [step]).hideable(hosts, ceiling))


def test_bytes_that_can_be_hidden(hiding: Any) -> None:
    # The first bucket is full 10 ms before the last gradient: its 4000 bytes cross in time. The
    # last bucket never does.
    assert hideable(hiding, [0, 10], [4000, 9000], [10]) == 4000
    assert hideable(hiding, [0, 10], [40_000, 9000], [10]) == 10_000
    # The second bucket is full at once and waits for the first; 1000 of its bytes are too late.
    assert hideable(hiding, [0, 0, 10], [4000, 7000, 1], [10]) == 10_000
    # The wire is idle from 4 to 8 ms.
    assert hideable(hiding, [0, 8, 10], [4000, 7000, 1], [10]) == 6000
    # Between four hosts, 1.5 times the bytes cross.
    assert hideable(hiding, [0, 10], [4000, 1], [10], hosts=4) == 6000
    # A rank whose last gradient is ready earlier can hide fewer bytes.
    assert hideable(hiding, [2, 10], [40_000, 1], [10, 6]) == (8000 + 4000) / 2
    assert hideable(hiding, [2, 10], [40_000, 1], [10, 1]) == (8000 + 0) / 2


def test_a_bucket_can_cross_when_it_is_full_on_all_ranks(hiding: Any) -> None:
    steps = [
        {"full": [7.001, 7.004], "last": 7.004, "crossed": 30, "end": 7.021},
        {"full": [7.003, 7.009], "last": 7.010, "crossed": 50, "end": 7.020},
    ]
    trace = hiding.Trace.of([{"sizes": [8, 1], "steps": [step]} for step in steps])
    ready, first, last, end = [2.0, 8.0], [0.0, 2.0], [3.0, 9.0], [20.0, 19.0]
    assert trace.steps == [hiding.Step(ready, first, last, end, [30, 50])]
    assert trace.crossed() == 40
    assert trace.in_transfer_ms() == (20 + 17) / 2
    assert hiding.Trace.read(trace.text()) == trace


def row(competitor: str, turns: list[float]) -> Any:
    from calls.call_rows import Row

    median = sorted(turns)[len(turns) // 2]
    where = {"hosts": 1, "ranks_per_host": 2, "rate": "", "nics": None}
    figures = {"median_us": median, "min_us": min(turns), "p90_us": 0.0, "cpu_us": 0.0}
    links = {"utilisation": None, "of_ceiling": None, "wire_ratio": None, "drops": None}
    return Row(
        date="",
        machine="",
        versions="",
        op="all_gather",
        dtype="bf16",
        bytes=4096,
        competitor=competitor,
        version="",
        iterations=1,
        turns=len(turns),
        turns_us=" ".join(str(turn) for turn in turns),
        **where,
        **figures,
        **links,
    )


@pytest.mark.parametrize(
    ("this", "other", "verdict"),
    [
        ([11.0, 12.0, 13.0], [8.0, 9.0, 10.0], "slower"),
        ([8.0, 9.0, 10.0], [11.0, 12.0, 13.0], "faster"),
        ([8.0, 9.0, 12.0], [11.0, 12.0, 13.0], "no"),
    ],
)
def test_builds_differ_beyond_the_spread_if_all_turns_do(
    this: list[float], other: list[float], verdict: str
) -> None:
    from calls import tables_of_builds

    cells = tables_of_builds.lines_of([row("smddp", this), row("smddp-other", other)])
    ratios = sorted(a / b for a, b in zip(this, other, strict=True))
    shown = [f"{figure:.3f}" for figure in (this[1] / other[1], *ratios)]
    assert cells == [
        [
            *("all_gather", "bf16", "4,096", "smddp"),
            *(f"{this[1]:.3g}", f"{other[1]:.3g}", *shown, verdict),
        ]
    ]


def test_the_other_build_must_be_there_and_be_its_own(tmp_path: Path) -> None:
    from shared.build import imported_tree, other_build

    build = other_build(tmp_path)
    assert "core_collectives is not built; `make bench-programs`" in (build.missing_core() or "")
    assert "does not exist" in (build.missing_package() or "")
    build.python.parent.mkdir(parents=True)
    build.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    build.python.chmod(0o755)
    found = f"imports deepspeed_smddp from {imported_tree()}, not from"
    assert found in (build.missing_package() or "")


def test_sockets_are_never_the_best_peer() -> None:
    from calls.comparison import best_peer

    times = {"smddp": 30.0, "sockets": 10.0, "sockets-doubling": 9.0, "impi": 14.0}
    rows: dict[str, Any] = {name: SimpleNamespace(median_us=us) for name, us in times.items()}
    found = best_peer(rows)
    assert found is not None
    assert found.median_us == 14.0
