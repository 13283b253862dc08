"""DeepSpeed's comms_logger and monitor show what smddp does."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.training import Trainer

pytest.importorskip("deepspeed")

GATHER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor"


def counted(result: dict[str, Any], collective: str, key: str) -> int:
    return sum(row[key] for row in result["statistics"] if row["collective"] == collective)


def log(trainer: Trainer, layout: str, **job: Any) -> list[dict[str, Any]]:
    job = {"known": True, "ops": [], "debug": False, **job}
    return trainer.call("harness.log_jobs:comms_log", layout, "smddp", **job)


@pytest.mark.parametrize("layout", ["AA", "AB"])
def test_comms_logger_has_the_bytes_of_the_counters(trainer: Trainer, layout: str) -> None:
    for result in log(trainer, layout):
        gathered, gathers, shortest = result["log"][GATHER]
        reduced, reductions, _ = result["log"][REDUCE]
        # DeepSpeed counts an AllGather by its input, smddp by its output.
        assert len(layout) * gathered == counted(result, "all_gather", "bytes") > 0
        assert gathers == counted(result, "all_gather", "calls") > 0
        assert reduced == counted(result, "reduce_scatter", "bytes") > 0
        assert reductions == counted(result, "reduce_scatter", "calls") > 0
        assert shortest > 0


def test_comms_logger_of_chosen_operations_and_with_names_of_callers(trainer: Trainer) -> None:
    result = log(trainer, "AA", ops=[REDUCE], debug=True)[0]
    name = f"{REDUCE} | [Caller Func: smddp]"
    assert set(result["log"]) == {name}
    assert result["log"][name][0] == counted(result, "reduce_scatter", "bytes") > 0


def test_an_unknown_comms_logger_gets_deepspeeds_own_operations(trainer: Trainer) -> None:
    ours, theirs = log(trainer, "AA"), log(trainer, "AA", known=False)
    assert ours[0]["losses"] == theirs[0]["losses"]
    for name in (GATHER, REDUCE):
        assert ours[0]["log"][name][0] == theirs[0]["log"][name][0], "the same bytes"
    # DeepSpeed gathers the persistent parameters one by one.
    assert ours[0]["log"][GATHER][1] < theirs[0]["log"][GATHER][1]


@pytest.mark.parametrize("wanted", [True, False])
def test_csv_monitor(trainer: Trainer, tmp_path: Path, wanted: bool) -> None:
    results = trainer.call(
        "harness.log_jobs:monitored", "AA", "smddp", folder=str(tmp_path), wanted=wanted
    )
    files = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert "Train_Samples_lr.csv" in files, "DeepSpeed's own events"
    ours = {name: path for name, path in files.items() if name.startswith("smddp_")}
    if not wanted:
        assert not ours
        return
    (row,) = [r for r in results[0]["statistics"] if r["collective"] == "all_gather"]
    for key in ("calls", "bytes", "seconds", "wait_seconds"):
        path = ours[f"smddp_all_gather_{row['path']}_{key}.csv"]
        lines = list(csv.reader(path.open()))
        # Five steps of 2 x 2 x 2 samples, events after the second and the fourth.
        assert [line[0] for line in lines] == ["step", "16", "32"]
        values = [float(line[1]) for line in lines[1:]]
        assert 0 <= values[0] <= values[1] <= row[key]
        if key != "wait_seconds":  # a gather may be complete before a step waits for it
            assert 0 < values[0] < values[1]


def step(engine: Any) -> str:
    engine.global_steps += 1
    return "stepped"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine on rank 0 of a default group of smddp; its monitor's disk is full."""
    from deepspeed_smddp import errors
    from deepspeed_smddp.config import settings
    from deepspeed_smddp.config.schema import SmddpConfig
    from deepspeed_smddp.deepspeed import comm_backend
    from deepspeed_smddp.distributed import backend

    def write_events(events: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(settings, "_applied", settings.resolve(SmddpConfig()))
    monkeypatch.setattr(backend, "_default_rank", 0)
    monkeypatch.setattr(comm_backend, "serves_default_group", lambda: True)
    return SimpleNamespace(
        monitor=SimpleNamespace(enabled=True, write_events=write_events),
        global_steps=0,
        global_samples=0,
        steps_per_print=lambda: None,
    )


def test_a_monitor_that_fails_does_not_stop_training(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed_smddp.deepspeed import monitoring

    with caplog.at_level("WARNING"):
        assert [monitoring._step(step, engine) for _ in range(9)] == ["stepped"] * 9
        assert not caplog.records, "without steps_per_print the tenth step is the first"
        assert [monitoring._step(step, engine) for _ in range(21)] == ["stepped"] * 21
    assert len(caplog.records) == 1 and "the disk is full" in caplog.text


def test_an_unknown_engine_gets_no_counters(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed_smddp.deepspeed import monitoring
    from deepspeed_smddp.upstream import source

    place = next(iter(source.READ["monitor"]))
    monkeypatch.setitem(source.READ["monitor"], place, {})
    source.known.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert [monitoring._step(step, engine) for _ in range(20)] == ["stepped"] * 20
    finally:
        source.known.cache_clear()
    assert len(caplog.records) == 1 and "gets no counters" in caplog.text
