"""``smddp trace``: dumps of ranks whose clocks differ, put on one clock."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepspeed_smddp.commands.main import app
from deepspeed_smddp.deepspeed import monitoring
from deepspeed_smddp.diagnostics import rank_ports
from deepspeed_smddp.diagnostics.rank_ports import Clock
from deepspeed_smddp.diagnostics.report.dump import Dump, Group, Operation, StepEnd
from deepspeed_smddp.diagnostics.trace import views
from deepspeed_smddp.diagnostics.trace.timeline import host_clocks, lanes, timeline
from deepspeed_smddp.intervals import common, length, union, without

START = 1_800_000_000.0
MS = 1e-3
# What the clock of each host shows more than the true time.
AHEAD = {"host-a": 0.0, "host-b": 0.250, "host-c": -1.7}
FLIGHT = 10 * MS


def job(
    hosts: str = "aabb", calls: int = 20, clock: dict[str, Clock] | None = None, seed: int = 3
) -> dict[int, Dump]:
    """Dumps of ranks, a letter for the host of each, that call AllGathers of ZeRO-3.

    Call c is at 100 c ms of the true time, up to 2 ms later on some ranks; all of a call end
    within 1 ms. Each rank waits for the second half. A step has 5 calls.
    """
    chance = random.Random(seed)
    ranks, names = len(hosts), [f"host-{letter}" for letter in hosts]
    found = {}
    starts = [[START + c * 0.1 + chance.uniform(0, 2 * MS) for _ in hosts] for c in range(calls)]
    for rank, host in enumerate(names):
        ahead = AHEAD[host]
        operations = []
        for c in range(calls):
            at, end = (
                starts[c][rank] + ahead,
                max(starts[c]) + FLIGHT + chance.uniform(0, MS) + ahead,
            )
            operations.append(
                Operation(
                    id=c + 1,
                    group="0",
                    sequence=c + 1,
                    operation="all_gather",
                    bytes=1 << 20,
                    dtype="bfloat16",
                    path="direct",
                    label=f"ZeRO-3 module h.{c % 5} (2 parameters)",
                    parameters=[f"h.{c % 5}.weight", f"h.{c % 5}.bias"],
                    called=at,
                    started=at,
                    first_byte=at + 3 * MS,
                    last_byte=end,
                    wait_entered=at + 5 * MS,
                    wait_left=end,
                )
            )
        found[rank] = Dump(
            version=1,
            job="pretraining",
            rank=rank,
            ranks=ranks,
            host=host,
            time=START + calls * 0.1 + ahead,
            operations=operations,
            groups=[Group(name="0", rank=rank, members=list(range(ranks)), hosts=names)],
            clock=(clock or {}).get(host),
            steps=[
                StepEnd(number=n, ended=START + n * 0.5 - 1 * MS + ahead)
                for n in range(calls // 5 + 1)
            ],
        )
    return found


def save(dumps: dict[int, Dump], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        (folder / f"rank-{rank}.json").write_text(dump.model_dump_json())
    return folder


def run(*arguments: object) -> tuple[int, str]:
    """The command's exit code, and its output in one line."""
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def traced(folder: Path, dumps: dict[int, Dump], *arguments: object) -> tuple[str, dict[str, Any]]:
    """What the command says of the dumps, and the trace that it writes."""
    code, said = run(save(dumps, folder / "dumps"), "-o", folder / "t.json", *arguments)
    assert code == 0, said
    trace = json.loads((folder / "t.json").read_text())
    check_format(trace)
    return said, trace


def refused(*arguments: object) -> str:
    code, said = run(*arguments)
    assert code in (1, 2)
    return said


def events(trace: dict[str, Any], category: str, rank: int | None = None) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == category and rank in (None, event["pid"])
    ]


def test_what_ranks_were_told_by_rank_0_is_used() -> None:
    told = Clock(offset=0.2501, uncertainty=0.2 * MS, round_trips=16)
    clocks = host_clocks(job(clock={"host-b": told}))
    assert clocks["host-a"].offset == 0
    assert clocks["host-b"].offset == 0.2501
    assert clocks["host-b"].uncertainty == 0.2 * MS
    assert "16 round trips" in clocks["host-b"].source
    assert not clocks["host-b"].warning


@pytest.mark.parametrize("seed", range(5))
def test_collectives_tell_the_offset_within_the_stated_uncertainty(seed: int) -> None:
    clocks = host_clocks(job("aabbcc", seed=seed))
    for host, ahead in AHEAD.items():
        uncertainty = clocks[host].uncertainty
        assert abs(clocks[host].offset - ahead) <= uncertainty
        assert uncertainty <= FLIGHT + 1 * MS


def test_a_clock_that_drifts_is_less_sure() -> None:
    dumps = job(clock={"host-b": Clock(offset=0.250, uncertainty=0.1 * MS, round_trips=16)})
    for op in dumps[2].operations[:2] + dumps[3].operations[:2]:
        for name in ("called", "started", "first_byte", "last_byte", "wait_entered", "wait_left"):
            setattr(op, name, getattr(op, name) - 50 * MS)  # 50 ms were gained since then
    clock = host_clocks(dumps)["host-b"]
    assert clock.uncertainty > 35 * MS
    assert "drifted" in clock.warning


def test_hosts_without_a_common_collective_say_that_nothing_is_known() -> None:
    dumps = job("ab")
    for dump in dumps.values():
        dump.groups[0].members = [dump.rank]
    clocks = host_clocks(dumps)
    assert not clocks["host-b"].is_known
    assert "not known" in clocks["host-b"].text


def test_the_dump_of_rank_0_is_missing() -> None:
    told = Clock(offset=0.2501, uncertainty=0.2 * MS, round_trips=16)
    dumps = job(clock={"host-b": told})
    del dumps[0], dumps[1]
    assert host_clocks(dumps)["host-b"].offset == 0.2501
    del dumps[2]
    dumps[3].clock = None
    assert host_clocks(dumps)["host-b"].source == "the reference"


def test_the_events_of_one_collective_line_up() -> None:
    trace = views.trace(timeline(job("aabbcc")))
    by_call: dict[int, list[dict[str, Any]]] = {}
    for event in events(trace, "collective"):
        by_call.setdefault(event["args"]["seq"], []).append(event)
    assert len(by_call) == 20
    for of in by_call.values():
        assert len(of) == 6
        begin, end = max(e["ts"] for e in of), min(e["ts"] + e["dur"] for e in of)
        assert begin < end  # all of them are in flight at one time
        assert {e["args"]["last_called_by_rank"] for e in of} == {
            max(of, key=lambda e: e["ts"])["pid"]
        }


def test_the_arguments_of_a_collective() -> None:
    event = events(views.trace(timeline(job())), "collective", rank=2)[3]
    args = event["args"]
    assert event["name"] == "all_gather: ZeRO-3 module h.3 (2 parameters)"
    assert args["parameters"] == ["h.3.weight", "h.3.bias"]
    assert (args["group"], args["seq"], args["bytes"]) == ("0", 4, 1 << 20)
    assert (args["dtype"], args["path"], args["state"]) == ("bfloat16", "direct", "done")
    assert args["first_byte_after_us"] == pytest.approx(3000, abs=1)


def check_format(trace: dict[str, Any]) -> None:
    """What the description of the Trace Event Format asks for, of the kinds of events used here."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        assert event["ph"] in "XMi"
        if event["ph"] == "M":
            assert isinstance(event["args"], dict)
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        else:
            assert isinstance(event["ts"], (int, float))
            assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for of in by_thread.values():
        of.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(of):  # slices of a thread may not cross
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_operations_in_flight_together_lie_on_lanes() -> None:
    dumps = job("aa", calls=6)
    for dump in dumps.values():
        for op in dump.operations:  # each lasts until the call after the next one has begun
            op.last_byte = (op.called or 0) + 0.205
    trace = views.trace(timeline(dumps))
    check_format(trace)
    of = events(trace, "collective", rank=1)
    assert len(of) == 6
    assert len({event["tid"] for event in of}) == 3
    names = [
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 1
    ]
    assert names == [
        "steps",
        "compute",
        "waits",
        "group 0 of 2 ranks",
        "group 0 of 2 ranks, 2",
        "group 0 of 2 ranks, 3",
    ]


def test_what_is_hidden() -> None:
    dumps = job("a", calls=10)
    line = timeline(dumps).ranks[0]
    shares = {k: length(spans) for k, spans in line.parts((START, START + 1.0)).items()}
    flights = [(op.called or 0, op.last_byte or 0) for op in dumps[0].operations]
    assert shares["in_flight"] == pytest.approx(sum(end - start for start, end in flights))
    assert shares["hidden"] == pytest.approx(10 * 5 * MS, rel=1e-4)
    assert shares["waits"] == pytest.approx(shares["in_flight"] - 50 * MS, rel=1e-4)
    assert shares["compute"] == pytest.approx(1.0 - shares["waits"])


def test_a_ring_that_wrapped_says_from_when_it_is_complete(tmp_path: Path) -> None:
    dumps = job()
    del dumps[1].operations[:7]
    said, trace = traced(tmp_path, dumps)
    assert "rank 1: complete from 70" in said
    assert "7 operations before that are forgotten" in said
    assert set(trace["otherData"]["complete_from_us"]) == {"1"}
    (mark,) = events(trace, "record")
    assert mark["pid"] == 1
    assert mark["args"] == {"operations_before": 7}
    said = refused(tmp_path / "dumps", "-o", tmp_path / "t.json", "--step", 1)
    assert "step 1 is not whole in the records of all ranks; these are: 3, 4" in said


def test_a_step(tmp_path: Path) -> None:
    said, trace = traced(tmp_path, job(), "--step", 2)
    assert "steps 1 to 4" in said
    for rank in range(4):
        found = events(trace, "collective", rank)
        assert [event["args"]["seq"] for event in found] == [6, 7, 8, 9, 10]
        assert "step 2" in [event["name"] for event in events(trace, "step", rank)]


def test_operations_that_have_not_ended_and_those_of_gloo() -> None:
    dumps = job("a", calls=3)
    waits, gloo = dumps[0].operations[2], dumps[0].operations[1]
    waits.state, waits.last_byte, waits.wait_left = "running", None, None
    gloo.group = "0 (forwarded)"
    gloo.last_byte = gloo.wait_entered = gloo.wait_left = None
    trace = views.trace(timeline(dumps))
    check_format(trace)
    forwarded, running = sorted(events(trace, "collective")[1:], key=lambda e: e["ts"])
    assert forwarded["args"]["group"] == "0 (forwarded)"
    assert forwarded["args"]["end"] == "not known"
    assert forwarded["dur"] == pytest.approx(3000, abs=1)  # the first byte is the last thing known
    assert running["args"]["state"] == "running"
    end = pytest.approx((dumps[0].time - (dumps[0].operations[0].called or 0)) * 1e6, abs=1)
    for event in (running, events(trace, "wait")[-1]):
        assert event["ts"] + event["dur"] == end


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    dumps = job()
    del dumps[2]
    said, trace = traced(tmp_path, dumps)
    assert "rank 2 has left no dump here and is not in the trace: copy the dumps" in said
    assert trace["otherData"]["ranks_without_a_dump"] == [2]


def test_the_clocks_are_stated(tmp_path: Path) -> None:
    told = Clock(offset=0.2501, uncertainty=0.2 * MS, round_trips=16)
    said, trace = traced(tmp_path, job(clock={"host-b": told}))
    assert "clock of host-a: +0.000 ms, within 0.000 ms (the reference)" in said
    assert "clock of host-b: +250.100 ms, within 0.200 ms (16 round trips to rank 0)" in said
    about = trace["otherData"]["clocks"]
    assert about[1]["offset_ms"] == pytest.approx(250.1)
    assert about[1]["uncertainty_ms"] == pytest.approx(0.2)


def test_the_latest_report_of_a_job_counts(tmp_path: Path) -> None:
    for number, calls in ((0, 5), (1, 10)):
        folder = save(job(calls=calls), tmp_path / f"report-{number}")
        os.utime(folder, (START + number, START + number))
    code, said = run(tmp_path, "-o", tmp_path / "t.json.gz")
    assert code == 0
    assert "40 operations of ranks 0-3 on 2 hosts" in said
    said = refused(*tmp_path.glob("report-*"), "-o", tmp_path / "t.json")
    assert "are both of rank 0: give the dumps of one report" in said


def test_what_no_trace_is_made_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path / "reports"))
    output = tmp_path / "t.json"
    assert "holds no dump (rank-*.json): `smddp report`" in refused(tmp_path, "-o", output)
    assert "no job over smddp runs" in refused("nothing-here", "-o", output)
    folder = save(job(), tmp_path / "dumps")
    other = job()[1]
    other.job = "evaluation"
    save({1: other}, tmp_path / "two")
    said = refused(folder / "rank-0.json", tmp_path / "two", "-o", output)
    assert "are of different jobs" in said and "of job evaluation with 4 ranks" in said
    said = refused(folder, "-o", tmp_path / "absent" / "t.json")
    assert "can't be written: there is no folder" in said
    (folder / "rank-3.json").write_text('{"version": 1, "ran')
    assert "rank-3.json holds no dump of a rank" in refused(folder, "-o", output)
    assert not output.exists()


def test_spans() -> None:
    some = union([(3, 4), (0, 1), (0.5, 2), (2, 2.5), (5, 5)])
    assert some == [(0, 2.5), (3, 4)]
    assert common(some, [(1, 3.5)]) == [(1, 2.5), (3, 3.5)]
    assert without([(0, 10)], some) == [(2.5, 3), (4, 10)]
    assert without(some, []) == some
    assert length(some) == 3.5
    assert lanes([(0, 2), (1, 3), (2, 4), (2.5, 3), (3, 4)]) == [0, 1, 0, 2, 1]


def test_a_clock_is_asked_and_the_answer_holds() -> None:
    behind = 3_600_000_000_000
    server = rank_ports.ClockServer("127.0.0.1", lambda: time.time_ns() - behind)
    server.start()
    try:
        found = rank_ports.measure(server.contact())
        assert found is not None
        assert 1 <= found.round_trips <= rank_ports.ROUND_TRIPS
        assert 0 < found.uncertainty < 1
        assert abs(found.offset - 3600) <= found.uncertainty
        token = server.contact().split(" ")[0]
        stranger = server.contact().replace(token, secrets.token_hex(16))
        assert rank_ports.measure(stranger) is None
    finally:
        server.close()
    assert not server.is_alive()
    closed = rank_ports.ClockServer("127.0.0.1")
    contact = closed.contact()
    closed.close()
    assert rank_ports.measure(contact) is None


def test_steps_of_an_engine_replace_those_of_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_has_engine", False), ("_ends", monitoring.deque(maxlen=3))):
        monkeypatch.setattr(monitoring, name, value)
    monitoring._after_optimizer(None, (), {})
    monitoring._after_optimizer(None, (), {})
    assert [end["number"] for end in monitoring.step_ends()] == [1, 2]
    monitoring._after_engine(8)
    monitoring._after_optimizer(None, (), {})
    (end,) = monitoring.step_ends()
    assert end["number"] == 8
    assert abs(end["ended"] - time.time()) < 60


def test_the_picture_says_what_is_hidden(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = save(job(), tmp_path / "dumps")
    png = tmp_path / "step.png"
    code, said = run(folder, "-o", tmp_path / "t.json", "--png", png, "--step", 2)
    assert code == 0, said
    # Of each of the five operations of 10 ms and more, half is waited for.
    assert "step.png: step 2: hidden 25.0 of " in said
    assert "ms of communication (mean of 4 ranks)" in said
    assert png.read_bytes().startswith(b"\x89PNG")
    code, said = run(folder, "-o", tmp_path / "t.json", "--png", tmp_path / "step.nonsense")
    assert code == 2
    assert "step.nonsense can't be written" in said
