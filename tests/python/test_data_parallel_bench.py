"""The benchmark of DDP's and FSDP2's steps: its arithmetic, and a run of a tiny model."""

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
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from steps import record

    return record


def hideable(record: Any, buckets: list[list[float]], hosts: int = 2) -> float | None:
    empty = dict.fromkeys(record.Row.__dataclass_fields__)
    row = record.Row(
        **empty
        | {
            "competitor": "smddp",
            "hosts": hosts,
            "ceiling": 1e6,  # bytes per second: 1000 a millisecond
            "buckets": json.dumps(buckets),
        }
    )
    return record.Setting([row]).hideable_bytes("smddp")


def test_what_can_be_hidden(record: Any) -> None:
    # Full 10 ms before the last gradient: 4000 bytes cross in time. The last bucket never does.
    assert hideable(record, [[10, 4000], [0, 9000]]) == 4000
    assert hideable(record, [[10, 40_000], [0, 9000]]) == 10_000
    # The second is full at once, and waits for the first; 1000 bytes of it are too late.
    assert hideable(record, [[10, 4000], [10, 7000], [0, 1]]) == 10_000
    # The wire idles from 4 to 8 ms.
    assert hideable(record, [[10, 4000], [2, 7000], [0, 1]]) == 6000
    # Between four hosts half as much again crosses.
    assert hideable(record, [[10, 4000], [0, 1]], hosts=4) == 6000


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
        sizes = [size for _, size in json.loads(row["buckets"])]
        assert sum(sizes) == float(row["reduced_bytes"]) == 4 * int(row["parameters"])
        assert len(sizes) > 1 and float(row["backward_ms"]) > 0
    assert float(rows["gloo"]["loss_difference"]) < 1e-4
