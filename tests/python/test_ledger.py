"""The counters reach a table, files and Prometheus, from the ranks that are asked to write."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ranks
from deepspeed_smddp.config import settings
from deepspeed_smddp.config.parsing import parse_section
from deepspeed_smddp.config.schema import Ledger
from deepspeed_smddp.diagnostics import counters
from deepspeed_smddp.diagnostics.counters import CounterWriter, Snapshot
from deepspeed_smddp.distributed import backend

STATES = ("in_use", "peak", "blocks", "segments", "reserved", "kept", "huge", "refused")
MEMORY = {state: number for number, state in enumerate(STATES, 1)}


def row(collective: str, path: str, calls: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "collective": collective,
        "path": path,
        "calls": calls,
        "bytes": 4096,
        "sent_bytes": 0,
        "sent_raw_bytes": 0,
        "seconds": 0.5,
        "wait_seconds": 0.25,
        **more,
    }


def taken(*rows: dict[str, Any], rank: int = 0) -> Snapshot:
    return Snapshot(1700000000.0, rank, "host/a", list(rows), MEMORY)  # type: ignore[arg-type]


ROWS = (
    row("broadcast", "fallback:gloo"),
    row("all_gather", "intranode"),
    row("refused", "fabric", 3),
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a default group, with the counters of ROWS."""
    monkeypatch.setattr(backend, "_default_rank", 0)
    monkeypatch.setattr(counters, "take", lambda rank: taken(*ROWS, rank=rank))


# --- the forms ------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """Checks the format on the way: HELP, TYPE, then samples of that metric only."""
    found: dict[tuple[str, str], float] = {}
    metric, kinds = "", {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            metric = line.split()[2]
            assert metric not in kinds, "a metric comes once"
        elif line.startswith("# TYPE "):
            assert line.split()[2] == metric
            kinds[metric] = line.split()[3]
        else:
            matched = SAMPLE.fullmatch(line)
            assert matched is not None, line
            assert matched[1] == metric
            found[(matched[1], matched[2])] = float(matched[3])
    assert all((name.endswith("_total")) == (kind == "counter") for name, kind in kinds.items())
    return found


def test_prometheus() -> None:
    found = samples(taken(*ROWS, rank=3).as_prometheus())
    labels = 'collective="all_gather",path="intranode",rank="3"'
    assert found[("smddp_calls_total", labels)] == 2
    assert found[("smddp_bytes_total", labels)] == 4096
    assert found[("smddp_seconds_total", labels)] == 0.5
    assert found[("smddp_wait_seconds_total", labels)] == 0.25
    assert found[("smddp_refused_messages_total", 'rank="3"')] == 3
    assert found[("smddp_memory_bytes", 'state="huge",rank="3"')] == 7
    assert found[("smddp_memory_refused_total", 'rank="3"')] == 8
    assert not any("refused" in labels for _, labels in found)


def test_label_values_are_escaped() -> None:
    assert counters.escaped('a\\b"c\nd') == 'a\\\\b\\"c\\nd'
    found = samples(taken(row('odd"\\\n', "p")).as_prometheus())
    assert ("smddp_calls_total", 'collective="odd\\"\\\\\\n",path="p",rank="0"') in found


def test_table() -> None:
    text = io.StringIO()
    taken(*ROWS).show(Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert "collectives of rank 0" in lines[0]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert ["all_gather", "intranode", "2", "4.1 kB", "0.500 s", "0.250 s"] in cells
    assert ["broadcast", "fallback:gloo", "2", "4.1 kB", "-", "-"] in cells
    assert lines[-1] == "3 messages from outside the job were refused."


def test_the_table_of_several_hosts_has_what_was_sent() -> None:
    text = io.StringIO()
    coded = row("all_gather", "ofi", sent_bytes=71_000_000, sent_raw_bytes=100_000_000)
    plain = row("barrier", "ofi", sent_bytes=8, sent_raw_bytes=8)
    taken(coded, plain).show(Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert any("│ 71.0 MB of 100.0 MB │" in line for line in lines)
    assert any(re.search("barrier .*│ +8 bytes │", line) for line in lines)
    found = samples(taken(coded).as_prometheus())
    labels = 'collective="all_gather",path="ofi",rank="0"'
    assert found[("smddp_sent_bytes_total", labels)] == 71_000_000
    assert found[("smddp_sent_raw_bytes_total", labels)] == 100_000_000


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "local_rank", "writers"),
    [
        ("", None, []),
        ("a.json", None, [0]),
        ("a{rank}.json", None, [0, 1, 2]),
        ("a{host}.json", "0", [0, 1, 2]),
        ("a{host}.json", "1", []),
        ("a{host}-{rank}.json", "1", [0, 1, 2]),
    ],
)
def test_who_writes(
    name: str, local_rank: str | None, writers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert [rank for rank in range(3) if counters.path_of(name, rank, "h")] == writers
    assert counters.path_of("x/{host}-{rank}{other}.prom", 4, "a/b") == Path("x/a_b-4{other}.prom")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    for text in ("one\n", "two\n"):
        counters.replace(path, text)
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]
    target = tmp_path / "folder"
    (target / "full").mkdir(parents=True)
    with pytest.raises(OSError):
        counters.replace(target, "text")
    assert sorted(tmp_path.iterdir()) == [path, target]


def test_a_bad_path_warns_once_and_the_other_files_are_written(
    written: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = tmp_path / "good.prom", tmp_path / "missing" / "a.jsonl"
    writer = CounterWriter(Ledger(prometheus_file=str(good), json_lines=str(bad)))
    with caplog.at_level(logging.WARNING):
        writer.write(last=False)
        writer.write(last=True)
    said = f"smddp: the counters can't be written to {bad}: No such file or directory"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert samples(good.read_text())


def test_intervals(written: None, tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    wanted = {
        "interval_seconds": 0.05,
        "json_lines": str(lines),
        "json_file": str(tmp_path / "a.json"),
    }
    writer = CounterWriter(Ledger(**wanted))
    deadline = time.monotonic() + 20
    while not lines.exists() or lines.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "a.json").exists(), "that one comes at the end"
    assert writer.stop()
    count = lines.read_text().count("\n")
    writer.write(last=True)
    assert lines.read_text().count("\n") == count + 1
    assert all(json.loads(line)["rank"] == 0 for line in lines.read_text().splitlines())
    assert json.loads((tmp_path / "a.json").read_text())["rows"]


def test_the_settings_start_and_end_the_reporter(
    written: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def follow(ledger: dict[str, Any]) -> CounterWriter | None:
        counters.follow(settings.resolve(parse_section({"ledger": ledger})))
        return counters._writer

    monkeypatch.setattr(counters, "_writer", None)
    monkeypatch.setattr(counters, "_at_exit", True)  # this process writes nothing at its end
    assert follow({}) is None, "nothing is written by default"
    every = {"json_lines": str(tmp_path / "a"), "interval_seconds": 60}
    first = follow(every)
    assert first is not None and follow(every) is first
    assert [t.name for t in threading.enumerate()].count("smddp-ledger") == 1
    assert follow({}) is None
    assert "smddp-ledger" not in [t.name for t in threading.enumerate()]
    assert follow(every) is not None
    counters.finish()
    assert (tmp_path / "a").read_text().count("\n") == 1


def test_without_a_default_group_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "_default_rank", None)
    CounterWriter(Ledger(json_file=str(tmp_path / "a"), table=True)).write(last=True)
    assert not list(tmp_path.iterdir())


# --- a job ----------------------------------------------------------------------------------------

PROGRAM = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("smddp")
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.05)
    child = os.fork()
    if child == 0:
        raise SystemExit  # runs what a process runs at its end, and writes nothing
    os.waitpid(child, 0)
    dist.destroy_process_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    ledger = {
        "table": True,
        "json_file": str(tmp_path / "end.json"),
        "json_lines": str(tmp_path / "every.{rank}.jsonl"),
        "prometheus_file": str(tmp_path / "smddp.{rank}.prom"),
        "interval_seconds": 0.05,
    }
    outputs = ranks.run(
        f"""
    import deepspeed_smddp
    deepspeed_smddp.configure(ledger={ledger!r}){PROGRAM}""",
        2,
    )
    assert outputs[0].count("collectives of rank 0") == 1
    assert "collectives of rank" not in outputs[1]
    names = [
        "end.json",
        *(f"{n}.{r}.{e}" for n, e in (("every", "jsonl"), ("smddp", "prom")) for r in (0, 1)),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for rank in (0, 1):
        lines = [
            json.loads(line) for line in (tmp_path / f"every.{rank}.jsonl").read_text().splitlines()
        ]
        assert len(lines) >= 2 and {line["rank"] for line in lines} == {rank}
        (last,) = [r for r in lines[-1]["rows"] if r["collective"] == "all_reduce"]
        assert last["calls"] == 5 and last["bytes"] == 5 * 4000
        found = samples((tmp_path / f"smddp.{rank}.prom").read_text())
        labels = f'collective="all_reduce",path="{last["path"]}",rank="{rank}"'
        assert found[("smddp_bytes_total", labels)] == last["bytes"]
    assert json.loads((tmp_path / "end.json").read_text())["rows"][0]["calls"] == 5


def test_a_job_that_asks_for_nothing_writes_nothing() -> None:
    outputs = ranks.run(PROGRAM + "    import threading; print(threading.enumerate())\n", 2)
    assert "smddp-ledger" not in outputs[0] and "collectives of rank" not in outputs[0]
