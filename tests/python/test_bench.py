"""``smddp bench``: its arithmetic, its check of results, its page and files, and real runs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from rich.console import Console
from typer.testing import CliRunner

import ranks
from deepspeed_smddp import _C
from deepspeed_smddp.bench import bench_job, bench_page, timed_values
from deepspeed_smddp.bench.bench_case import DTYPES, TITLES, BenchError, Case, cases, sizes
from deepspeed_smddp.bench.bench_report import FAILED, RIGHT, STOPPED, BenchReport, Result, Sent
from deepspeed_smddp.bench.call_buffers import CallBuffers
from deepspeed_smddp.bench.timed_values import TimedValues
from deepspeed_smddp.commands.main import app
from deepspeed_smddp.diagnostics import output_files
from deepspeed_smddp.diagnostics.doctor import machine
from deepspeed_smddp.planning import PlanError, training_job

SMDDP = [sys.executable, "-m", "deepspeed_smddp.commands.main", "bench"]


# ---- what a case stands for


def test_sizes_rise_by_the_factor_and_are_whole_elements_of_each_rank() -> None:
    assert sizes("4K", "1M", 16) == [4096, 65536, 1 << 20]
    found = cases(["all_gather"], ["bf16", "fp32"], [4, 4096], 3)
    assert [(c.dtype, c.size) for c in found] == [
        *(("bf16", 6), ("bf16", 4092)),
        *(("fp32", 12), ("fp32", 4092)),
    ]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # nccl-tests, doc/PERFORMANCE.md: AllGather and ReduceScatter (n-1)/n, AllReduce 2(n-1)/n,
    # Broadcast and Reduce 1.
    factors = {"all_gather": 0.75, "reduce_scatter": 0.75, "all_reduce": 1.5}
    for op, factor in {**factors, "broadcast": 1, "reduce": 1}.items():
        result = Result(Case(op, "fp32", 4000), "smddp", [[1e-6, 2e-6, 4e-6]])
        assert result.algbw == pytest.approx(2e9)
        assert result.busbw(4) == pytest.approx(2e9 * factor)


# ---- the check


def right_call(buffers: CallBuffers) -> Callable[[], None]:
    """Writes the right result of a rank of 3, element by element."""
    case, n = buffers.case, buffers.ranks
    counts = case.tensor_counts(n)

    def gathered(rank: int, index: int) -> int:
        return (index + rank) % 251

    def total(index: int) -> int:
        return sum((index + 3 * rank) % 7 for rank in range(n))

    def call() -> None:
        values: list[int] = []
        first = 0
        for count in counts:
            if case.op == "broadcast":
                values = [gathered(0, i) for i in range(count * n)]
            elif case.gathers:
                values += [gathered(r, first + i) for r in range(n) for i in range(count)]
                first += count
            elif not case.in_place:
                values += [total(first + count + i) for i in range(count)]
                first += count * n
        if case.op in ("all_reduce", "reduce"):
            values = [total(i) for i in range(sum(counts) * n)]
        result = buffers.part if case.op.startswith("reduce_scatter") else buffers.whole
        result.copy_(torch.tensor(values).to(result.dtype))

    return call


@pytest.mark.parametrize("op", TITLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_is_named(op: str, dtype: str) -> None:
    rank = 0 if op == "reduce" else 1  # only the root has a result
    buffers = CallBuffers(Case(op, dtype, 3 * 4 * 500), rank, 3, torch.device("cpu"))
    right = right_call(buffers)
    assert buffers.check(right) is None
    result = buffers.part if op.startswith("reduce_scatter") else buffers.whole
    for index in (0, len(result) // 3 + 5, len(result) - 1):

        def spoilt(at: int = index) -> None:
            right()
            result[at] += 1

        wrong = buffers.check(spoilt)
        assert wrong is not None and wrong.element == index and wrong.got == wrong.expected + 1
    assert buffers.check(lambda: None) is not None, "a call that does nothing"


# ---- the page, the files, the refusals


def report(**changes: object) -> BenchReport:
    results = [
        Result(case, backend, [[1e-3 * (1 + i), 1.5e-3] for i in range(3)])
        for case in cases(list(TITLES), ["bf16"], [4096, 256 << 20], 16)
        for backend in ("smddp", "gloo")
    ]
    hosts = {f"a-host-with-a-long-name-{h}": [2 * h, 2 * h + 1] for h in range(8)}
    given = {"rate": 1.25e9, "rate_origin": "stated by the NICs", "planned": 14, "results": results}
    given |= {"device": "CPU", "backends": ["smddp", "gloo"], "hosts": hosts, **changes}
    return BenchReport("2026-01-01T00:00:00+00:00", {}, **given)


def printed(of: BenchReport) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    bench_page.show(of, console)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= bench_page.WIDTH, text
    assert "…" not in text
    return text


def test_the_page_fits_80_columns() -> None:
    whole = report()
    text = printed(whole)
    assert "All 28 results are right" in text and whole.status == RIGHT
    assert "AllGather of 8 tensors, bf16" in text and "256 MiB" in text and "10 Gbit/s" in text


def test_wrong_failed_and_partial_are_said() -> None:
    wrong = report()
    wrong.results[3].wrong = ["element 7 on rank 2 is 3, not 4"] * 2
    text = printed(wrong)
    assert "over gloo: element 7 on rank 2 is 3, not 4" in " ".join(text.split())
    assert wrong.status == FAILED and "right in every turn" not in text
    stopped = report(stopped="SIGINT", planned=40)
    assert "PARTIAL: 14 of 40 cases" in printed(stopped) and stopped.status == STOPPED
    failed = report(failure="rank 3 has ended", planned=40)
    assert "rank 3 has ended" in printed(failed) and failed.status == FAILED


def test_what_was_coded_and_why_is_said() -> None:
    rates = {"network": 0.12e9, "code": 6.1e9}
    pays = {**rates, "answers": 9, "pays": True, "ratio": 0.7}
    costs = {**rates, "answers": 2, "pays": False, "ratio": 1.0, "network": 6.2e9}
    before = Sent(100, 100, {**pays, "answers": 4})
    coded = Sent(810, 1100, pays).since(before)
    assert coded.ratio == 0.71 and coded.answer["answers"] == 5
    assert coded.why("auto") == "coded: network 0.12 GB/s, code 6.1 GB/s, ratio 0.71"
    assert Sent(5, 5, costs).why("auto") == "not coded: network 6.2 GB/s, code 6.1 GB/s, ratio 1.00"
    assert Sent(5, 5, before.since(before).answer).why("auto").startswith("not coded: too small")
    assert Sent(5, 5).why("off") == 'coding is "off"' and Sent().why("auto") == ""
    # Rank 0 sends nothing of Reduce: what another rank says counts.
    assert Sent().and_also(coded).and_also(Sent()) == coded
    whole = report()
    for result in whole.results:
        if result.backend == "smddp":
            result.sent = coded if result.case.size > 1 << 20 else Sent(5, 5)
    text = printed(whole)
    assert "4 KiB: not coded: too small" in text and "256 MiB: coded: network 0.12" in text
    assert "0.71" in text and json.dumps(whole.to_json()["results"][0])
    assert whole.rows()[2]["sent_bytes"] == 710 and "coded: " in whole.rows()[2]["coding"]


def test_what_the_timed_calls_move(tmp_path: Path) -> None:
    kinds = {"weights": 0.71, "gradients": 0.72, "random": 1, "zeros": 0}
    assert tuple(kinds) == timed_values.KINDS
    for name, ratio in kinds.items():
        values = TimedValues.of(name).elements(torch.bfloat16)
        sent = _C.measure_coding(values)["sent_bytes"]
        assert sent / values.nbytes == pytest.approx(ratio, abs=0.02), name
    some = torch.arange(6, dtype=torch.float32)
    numpy.save(tmp_path / "a.npy", some.numpy())
    state = {"model": {"a": some[:2], "steps": torch.tensor(1)}, "b": some[2:]}
    torch.save(state, tmp_path / "a.pt")
    safetensors.torch.save_file({"a": some}, tmp_path / "a.safetensors")
    (tmp_path / "a.f32").write_bytes(some.numpy().tobytes())
    for path in tmp_path.iterdir():
        assert TimedValues.of(str(path)).elements(torch.float32).tolist() == some.tolist(), path
        assert TimedValues.of(str(path)).elements(torch.bfloat16)[-1] == 5
    buffers = CallBuffers(
        *(Case("all_reduce", "fp32", 96), 1, 2), torch.device("cpu"), TimedValues("a", some)
    )
    buffers.prepare()
    assert buffers.whole.tolist() == [*range(6)] * 4


@pytest.mark.parametrize("name", ["a.npy", "a.pt", "a.safetensors", "empty", "none"])
def test_a_file_without_values_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"" if name == "empty" else b"no such file")
    (tmp_path / "none").unlink(missing_ok=True)
    said = f"--data is .*{name}; it is weights, .* or a file"
    with pytest.raises(BenchError, match=said) as told:
        TimedValues.of(str(tmp_path / name))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min", "3X"], "--min is '3X'"),
        (["--min", "2M", "--max", "1M"], "--min is the smaller one"),
        (["--ops", "all_gather,alltoall"], "--ops has 'alltoall'; it may have all_gather"),
        (["--beside", "mpi"], "'mpi' is not one of"),
        (["--ranks", "1"], "one rank has no other"),
        (["--data", "model"], "--data is model; it is weights, gradients, random, zeros or a file"),
        (["--json", "/nowhere/bench.json"], "there is no folder /nowhere"),
        (["--figure", "bench.txt"], "the end of the name is its format, one of "),
    ],
)
def test_a_wrong_question_is_refused_in_one_sentence(arguments: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["bench", *arguments])
    assert answer.exit_code == BenchError.status
    assert said in answer.output + (answer.stderr if answer.stderr_bytes else "")
    assert "Traceback" not in answer.output


def test_the_help_has_all_operations() -> None:
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--help"]).output
    assert all(op in said for op in TITLES), said


def test_local_ranks_hear_which_signal_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    class Rank:
        returncode = None

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def poll(self) -> int | None:
            if not heard:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.returncode

        def send_signal(self, number: int) -> None:
            heard.append(number)
            self.returncode = STOPPED

        kill = wait = lambda self: None

    monkeypatch.setattr(subprocess, "Popen", Rank)
    assert bench_job._run_local(2) == STOPPED
    assert heard == [signal.SIGTERM] * 2


def test_the_nics_of_a_provider_and_their_rate(tmp_path: Path) -> None:
    text = "tcp;ofi_rxm on eth0 (192.0.2.2), eth1 (2001:db8::1), libfabric 1.17 (/usr/lib/x.so)"
    assert machine.nics_of(text) == ["eth0", "eth1"]
    for name in ("rdmap0s6", "rdmap1s6"):
        port = tmp_path / f"class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert machine.rate_of(["rdmap0s6-rdm", "rdmap1s6-rdm"], tmp_path) == 25e9
    assert machine.rate_of(["rdmap0s6", "no-such-nic"], tmp_path) == 0


# ---- the planner takes what was measured


def plan(*words: str) -> tuple[int, str]:
    question = ["plan", "llama-2-7b", "a100-80", "--gpus", "64", "--json", "-", *words]
    answer = CliRunner().invoke(app, question)
    return answer.exit_code, answer.output


def measured(folder: Path, **changes: object) -> Path:
    """On two hosts of two ranks each, an AllGather of 900 MB over smddp takes 40 ms."""
    times = {("all_gather", "smddp", 1 << 20): 1e-3, ("all_gather", "smddp", 900_000_000): 40e-3}
    times |= {("all_gather", "gloo", 900_000_000): 1e-3, ("all_reduce", "smddp", 900_000_000): 1e-3}
    results = [Result(Case(op, "bf16", n), by, [[t]]) for (op, by, n), t in times.items()]
    path = folder / "bench.json"
    given = {"hosts": {"a": [0, 1], "b": [2, 3]}, "results": results, **changes}
    output_files.write_json(path, report(**given).to_json())
    return path


def test_the_planner_takes_the_measured_network(tmp_path: Path) -> None:
    # Half of the output crosses: 450 MB in 40 ms are 90 Gbit/s.
    path = measured(tmp_path)
    assert training_job.measured_gbit(path) == {"smddp": pytest.approx(90)}
    words = ("--network-from", str(path))
    assert "not known; measure with `smddp bench`" in plan(*words)[1]
    path.write_text(path.read_text().replace("gloo", "nccl"))
    assert training_job.measured_gbit(path)["nccl"] == pytest.approx(3600)
    assert "AllGather between hosts, measured: smddp 90, NCCL 3,600" in plan(*words)[1]


def test_what_says_nothing_of_a_network_is_refused(tmp_path: Path) -> None:
    for changes, why in (
        ({"hosts": {"a": [0, 1, 2, 3]}}, "inside one host"),
        ({"results": report().results[-2:]}, "has no AllGather by smddp or NCCL"),
    ):
        with pytest.raises(PlanError, match=why):
            training_job.measured_gbit(measured(tmp_path, **changes))


# ---- real runs


@pytest.mark.rare
@pytest.mark.slow
def test_local_ranks_measure_all_operations(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"bench.{kind}" for kind in ("csv", "json", "png")}
    command = [*SMDDP, "--ranks", "3", "--min", "1K", "--max", "64K", "--factor", "64"]
    command += ["--dtypes", "bf16,fp32", "--turns", "2", "--repeats", "3"]
    command += ["--csv", str(files["csv"]), "--json", str(files["json"])]
    command += ["--figure", str(files["png"])]
    ended = subprocess.run(
        command, env=ranks.environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == RIGHT, ended.stdout + ended.stderr
    assert "3 ranks on 1 host" in ended.stdout and "All 56 results are right" in ended.stdout
    found = json.loads(files["json"].read_text())
    rows = found["results"]
    keys = {(r["op"], r["dtype"], r["bytes"], r["backend"]) for r in rows}
    assert len(rows) == len(keys) == 7 * 2 * 2 * 2 and found["partial"] is False
    assert all(r["right"] and r["calls"] == 6 and len(r["turn_medians_us"]) == 2 for r in rows)
    for row in rows:
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p90_us"] <= row["p99_us"]
        algbw = row["bytes"] / row["p50_us"] / 1e3
        assert row["algbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)
    table = list(csv.DictReader(files["csv"].open()))
    assert len(table) == len(rows) and table[0]["p50_us"] == str(rows[0]["p50_us"])
    assert files["png"].read_bytes()[:4] == b"\x89PNG"


QUESTION = """
import os
from deepspeed_smddp.bench import bench_job, sweep
from deepspeed_smddp.bench.bench_job import Question
"""


def test_a_wrong_result_is_named_and_ends_all_ranks_with_1() -> None:
    program = """
    if os.environ["RANK"] == "2":
        import torch.distributed as dist
        right = dist.all_reduce
        def spoilt(tensor, *args, **kw):
            right(tensor, *args, **kw)
            if kw["group"] is not dist.group.WORLD:
                tensor[11] += 1
        dist.all_reduce = spoilt
    asked = Question(["all_gather", "all_reduce"], ["fp32"], [4096], sweep.Rules(2, 2))
    print("\\nstatus", bench_job.run(asked))
    """
    outputs = ranks.run(program, 3, timeout=120, imports=QUESTION)
    assert all(text.rstrip().endswith(f"status {FAILED}") for text in outputs)
    said = " ".join(outputs[0].split())
    assert "all_reduce of 4092 bytes, fp32, over gloo: element 11 on rank 2 is" in said
    assert "(wrong 2 times)" in said and "over smddp" not in said


def test_ranks_of_two_hosts_say_what_was_coded() -> None:
    program = """
    os.environ["SMDDP_HOST_ID"] = os.environ["RANK"]
    asked = Question(["all_gather", "reduce"], ["bf16"], [1 << 10, 1 << 20], sweep.Rules(1, 2))
    print("\\nstatus", bench_job.run(asked))
    """
    env = {"SMDDP_DEBUG": "curve=20:4:0.1"}
    outputs = ranks.run(program, 2, timeout=120, imports=QUESTION, env=env)
    assert outputs[0].count("1 KiB: not coded: too small") == 2
    assert outputs[0].count("1 MiB: coded: network 0.1 GB/s") == 2


def test_a_signal_to_one_rank_stops_all_after_the_turn() -> None:
    program = """
    import signal
    seen = []
    begin = sweep.CallBuffers.prepare
    def prepare(self):
        seen.append(self.case.size)
        if os.environ["RANK"] == "1" and len(seen) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(self)
    sweep.CallBuffers.prepare = prepare
    asked = Question(["all_gather"], ["bf16"], [1 << s for s in range(10, 20)], sweep.Rules(2, 2))
    print("\\nstatus", bench_job.run(asked))
    """
    outputs = ranks.run(program, 2, timeout=120, imports=QUESTION)
    assert all(text.rstrip().endswith(f"status {STOPPED}") for text in outputs)
    # A case is prepared six times: a warm-up and two turns of each backend.
    assert "Stopped by SIGTERM" in outputs[0] and "PARTIAL: 2 of 10 cases" in outputs[0]
    assert "1 KiB" in outputs[0] and "2 KiB" in outputs[0] and "4 KiB" not in outputs[0]
