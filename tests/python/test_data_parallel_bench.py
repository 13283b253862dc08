"""The benchmark of a DDP or FSDP2 step: its arithmetic, and a run with a tiny model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def hiding(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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


@pytest.mark.slow
def test_ddp_of_a_tiny_model(tmp_path: Path) -> None:
    path = tmp_path / "ddp.csv"
    small = "--scheme DDP --ranks 2 --layers 1 --hidden 64 --heads 2 --bucket-mb 0.1"
    short = "--turns 1 --seconds-per-turn 0.01"
    program = str(BENCHMARKS / "data_parallel_step.py")
    ended = subprocess.run(
        [sys.executable, program, *small.split(), *short.split(), "--csv", str(path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with path.open() as file:
        rows = {row["competitor"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"smddp", "gloo", "fake"}
    for row in rows.values():
        trace = json.loads(row["trace"])
        sizes = trace["sizes"]
        assert len(trace["steps"]) == int(row["steps"])
        assert all(step["ready"] == sorted(step["ready"]) for step in trace["steps"])
        assert sum(sizes) == float(row["reduced_bytes"]) == 4 * int(row["parameters"])
        assert len(sizes) > 1 and float(row["backward_ms"]) > 0
    assert float(rows["gloo"]["loss_difference"]) < 1e-4
