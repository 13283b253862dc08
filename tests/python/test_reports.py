"""Jobs of four ranks on two hosts that hang: the page says which rank, and what it does instead."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_smddp.commands import report
from deepspeed_smddp.diagnostics import report_files
from deepspeed_smddp.diagnostics.report.dump import Connection, DumpError, load
from deepspeed_smddp.diagnostics.report_exchange import ReportStore, introduce, withdraw
from deepspeed_smddp.diagnostics.report_files import JobFiles
from harness import programs
from harness.ports import free_port
from harness.programs import Ended, Programs
from harness.training import IMPORTS
from test_fr_trace import analyze

LAYOUT = "AABB"
SECONDS = 2  # the deadline of operations that are to fail
GATHER = "dist.all_gather_into_tensor(y, x)\n"
# An AllGather, as in it each rank hears from the rank in its place on the other host. In an
# AllReduce of this size only the first ranks of the hosts do.
START = f"""
join()
x, y = torch.ones(1000), torch.ones(4000)
{GATHER}print("ready", flush=True)
"""
HURRIED = START.replace("print", f"limit({SECONDS}); print")


def job(
    tmp_path: Path,
    program: str,
    imports: str = programs.IMPORTS,
    env: Mapping[str, str | None] | None = None,
) -> Programs:
    """Ranks that run a program from a file, as a user's: its lines are in the report."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(program))
    environment = {
        "SMDDP_REPORT_DIR": str(tmp_path / "reports"),
        "SMDDP_TIMEOUT_SECONDS": "60",
        "SMDDP_SILENCE_SECONDS": "4",
        "DS_ACCELERATOR": "cpu",
        **(env or {}),
    }
    start = f"exec(compile(open({str(file)!r}).read(), {str(file)!r}, 'exec'))"
    return Programs(LAYOUT, start, env=environment, imports=imports)


def end_after(running: Programs, waiting: tuple[int, ...]) -> list[Ended]:
    """Ends a job as soon as some of its ranks have ended themselves."""
    try:
        for rank in waiting:
            running.processes[rank].wait()
    finally:
        ends = running.end(limit=0.3)
    return ends


def why(ends: list[Ended]) -> str:
    """The sentence after "Why:" on the one page that a rank printed."""
    pages = [end.errors for end in ends if "Why: " in end.errors]
    story = "\n".join(f"rank {end.rank}:\n{end.errors}" for end in ends)
    assert len(pages) == 1 and pages[0].count("Why: ") == 1, story
    sentence = re.search(r"Why: (.*?)\n\n", pages[0], re.DOTALL)
    assert sentence is not None
    return re.sub(r"\s+", " ", sentence[1])


def page(folder: Path) -> str:
    (file,) = folder.rglob("page.txt")
    return re.sub(r"\s+", " ", file.read_text())


def sentence_of(tmp_path: Path, program: str, waiting: tuple[int, ...] = (0, 1, 2)) -> str:
    return why(end_after(job(tmp_path, HURRIED + program), waiting))


def smddp(tmp_path: Path, *words: str) -> str:
    """What the command says of a job."""
    command = "from deepspeed_smddp.commands.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "SMDDP_REPORT_DIR": str(tmp_path / "reports")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_that_does_something_else(tmp_path: Path) -> None:
    sentence = sentence_of(tmp_path, f"if rank == 3:\n    time.sleep(60)\n{GATHER}")
    assert sentence.startswith("rank 3 (host-B) is in time.sleep, called at train.py:7")
    assert "has not called all_gather #2 of group '0'" in sentence
    assert "in which ranks 0-2 wait" in sentence


DOINGS = """
import io
class Slow(io.BytesIO):
    def write(self, data):
        print("busy", flush=True)
        time.sleep(60)
def collate(rows):
    print("busy", flush=True)
    time.sleep(60)
if rank == 0:
    torch.save(x, Slow())
elif rank == 1:
    next(iter(torch.utils.data.DataLoader([0], collate_fn=collate)))
elif rank == 2:
    os.dup2(os.pipe()[0], 0)
    print("busy", flush=True)
    breakpoint()
else:
    print("busy", flush=True)
    time.sleep(60)
"""


def test_what_each_rank_does_is_asked_for(tmp_path: Path) -> None:
    running = job(tmp_path, START + DOINGS)
    try:
        for rank in range(4):
            running.wait_for(rank, "busy")
        time.sleep(0.5)  # until the debugger waits for its input
        said = smddp(tmp_path, "report", str(running.processes[3].pid))
    finally:
        running.end(limit=0.1)
    shown = " ".join(said.split())
    places = ("torch.save", "a DataLoader's next batch", "the debugger (pdb)", "time.sleep")
    for rank, place in enumerate(places):
        assert f"rank {rank}" in shown and f"in {place}, called at train.py:" in shown, said


def test_another_size(tmp_path: Path) -> None:
    program = "n = 500 if rank == 1 else 1000\ndist.all_gather_into_tensor(y[:4 * n], x[:n])"
    sentence = sentence_of(tmp_path, program, (0, 1, 2, 3))
    assert sentence.startswith("rank 1 (host-A) calls all_gather #2 of group '0' with another size")
    assert "rank 1: all_gather of 8000 bytes" in sentence
    (files,) = tmp_path.rglob("fr_trace")
    text = analyze(files)
    assert "Collective sequence number: 2 has errors" in text
    assert "SIZE_OR_SYNTAX_MISMATCH" in text


def connection(folder: Path, rank: int, to: int) -> Connection:
    """What the dump of a rank says of the way to another one."""
    (file,) = folder.rglob(f"rank-{rank}.json")
    (found,) = (c for group in load(file).groups for c in group.connections if c.rank == to)
    return found


@pytest.mark.parametrize(
    ("number", "words", "local", "remote"),
    [
        ("SIGKILL", "ended", "ended", ("connected", "ended", "lost")),
        ("SIGSTOP", "answered", "stopped", ("silent", "lost")),
    ],
)
def test_a_rank_that_is_gone(
    tmp_path: Path, number: str, words: str, local: str, remote: tuple[str, ...]
) -> None:
    running = job(tmp_path, START + f"if rank == 3:\n    time.sleep(60)\n{GATHER}")
    running.wait_for(3, "ready")
    os.kill(running.processes[3].pid, getattr(signal, number))
    sentence = why(end_after(running, (0, 1, 2)))
    assert sentence.startswith("rank 3 (host-B)")
    assert words in sentence
    assert "ranks 0-2 wait in all_gather #2" in sentence
    assert connection(tmp_path, 0, 1).state == "connected"
    inside, between = connection(tmp_path, 2, 3), connection(tmp_path, 1, 3)
    assert (inside.state, inside.path) == (local, "shared memory")
    assert between.state in remote
    assert between.last_message_seconds is not None
    assert " on " in between.path
    shown = page(tmp_path)
    assert f"- rank 3 (host-B): {local}, to rank 2, over shared memory" in shown
    assert (f"- rank 3 (host-B): {between.state}" in shown) == (between.state != "connected")


def test_the_rank_with_the_store_is_gone(tmp_path: Path) -> None:
    start = START.replace(
        "join()",
        f'method = "tcp://127.0.0.1:{free_port()}"\n'
        "dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)",
    )
    running = job(tmp_path, start + f"if rank == 0:\n    time.sleep(60)\n{GATHER}")
    running.wait_for(0, "ready")
    os.kill(running.processes[0].pid, signal.SIGKILL)
    ends = end_after(running, (1, 2, 3))
    sentence = why(ends)
    assert sentence.startswith("rank 0 (host-A)")
    assert "ended" in sentence
    assert "Why:" in ends[1].errors


def test_a_signal_asks_for_a_report_and_nothing_ends(tmp_path: Path) -> None:
    program = START + (
        "while not os.path.exists(__file__ + '.end'):\n    time.sleep(0.05)\ndist.all_reduce(x)\n"
    )
    program = f"__file__ = {str(tmp_path / 'train.py')!r}\n{program}"
    running = job(tmp_path, program)
    for rank in range(4):
        running.wait_for(rank, "ready")
    asked = running.processes[2].pid
    said = smddp(tmp_path, "report", str(asked))
    (tmp_path / "train.py.end").touch()
    ends = running.end()
    assert [end.code for end in ends] == [0, 0, 0, 0]
    assert "ranks 0-3 are in time.sleep, called at train.py:8" in said
    assert "all 4 ranks wait in nothing" in why(ends)
    assert len(list(tmp_path.rglob("rank-*.json"))) == 4
    assert not list(tmp_path.rglob("running-*.json"))


@pytest.mark.parametrize(
    ("program", "said", "advice"),
    [
        ("pass", "has ended its program, without a further operation of group", "uneven batches?"),
        (
            "raise ValueError('bad batch')",
            "ended, after a failure: ValueError('bad batch')",
            "read the error",
        ),
    ],
)
def test_a_rank_that_ends_before_the_others(
    tmp_path: Path, program: str, said: str, advice: str
) -> None:
    program = f"if rank == 3:\n    {program}\nelse:\n    {GATHER}"
    sentence = why(end_after(job(tmp_path, START + program), (0, 1, 2)))
    assert sentence.startswith(f"rank 3 (host-B) {said}"), sentence
    assert advice in page(tmp_path).partition("What to do:")[2]


def test_nothing_is_left_without_trouble(tmp_path: Path) -> None:
    """Nor if no caller waits for the last operation."""
    ends = job(tmp_path, START + "dist.all_reduce(torch.ones(1 << 22), async_op=True)").end()
    assert [end.code for end in ends] == [0, 0, 0, 0]
    assert not any("Why:" in end.errors for end in ends), ends
    assert not (tmp_path / "reports").exists()


FULL = """
if rank == 1:
    from deepspeed_smddp.diagnostics import hang_reporter, report_files
    def full(*_): raise OSError(28, "No space left on device")
    report_files.replace = hang_reporter.replace = full
"""
ABORTED = """
further = dist.new_group()
if rank == 0:
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    dist.destroy_process_group()
    sys.exit()
"""
TIMED = """
began = time.monotonic()
try:
    CALL
except RuntimeError as error:
    print("raised after", time.monotonic() - began, "s")
"""


def seconds_to_raise(ends: list[Ended]) -> list[float]:
    found = [re.search(r"raised after ([\d.e-]+) s", end.output) for end in ends]
    assert all(found), ends
    return [float(match[1]) for match in found if match]


def test_a_full_disk_holds_up_no_rank(tmp_path: Path) -> None:
    another_size = TIMED.replace("CALL", "dist.all_reduce(torch.ones(10 + rank // 3))")
    ends = job(tmp_path, START + FULL + another_size).end()
    assert max(seconds_to_raise(ends)) < 5
    assert "No space left on device" in ends[1].errors
    assert "rank 1 (host-A)" in why(ends) or "ranks 0-2" in why(ends)


def test_an_abort_is_reported_by_no_rank(tmp_path: Path) -> None:
    """Nor held up, in a further group, for the one that has aborted and left."""
    call = TIMED.replace("CALL", "dist.all_reduce(x, group=further)")
    ends = job(tmp_path, START + ABORTED + call).end()
    assert max(seconds_to_raise(ends[1:])) < 5
    assert not any("Why: " in end.errors for end in ends), ends


WITHOUT_A_FOLDER = """
where = os.environ["SMDDP_REPORT_DIR"]
os.environ["SMDDP_REPORT_DIR"] = __file__
join()
try:
    dist.all_reduce(torch.ones(10 + rank // 3))
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
os.environ["SMDDP_REPORT_DIR"] = where
join("again")
dist.all_reduce(torch.ones(10))
time.sleep(1)
"""
STOPPED = """
from deepspeed_smddp.diagnostics import hang_reporter
join()
begun, collect = threading.Event(), hang_reporter.collect
def slow(*arguments):
    begun.set()
    time.sleep(1)
    return collect(*arguments)
hang_reporter.collect = slow
os.kill(os.getpid(), signal.SIGUSR2)
assert begun.wait(20)
dist.destroy_process_group()
until = time.monotonic() + 20
while "smddp-report" in [thread.name for thread in threading.enumerate()]:
    assert time.monotonic() < until
    time.sleep(0.05)
"""


def test_the_next_group_does_not_report_what_ended_the_one_before(tmp_path: Path) -> None:
    program = f"__file__ = {str(tmp_path / 'train.py')!r}\n{WITHOUT_A_FOLDER}"
    ends = job(tmp_path, program).end()
    assert all("called all_reduce(40 bytes" in end.output for end in ends), ends
    assert [end.code for end in ends] == [0, 0, 0, 0], ends
    assert not any("Why: " in end.errors for end in ends), ends


def test_a_reporter_that_is_stopped_during_a_report_ends(tmp_path: Path) -> None:
    ends = job(tmp_path, "import signal, threading\n" + STOPPED).end()
    assert [end.code for end in ends] == [0, 0, 0, 0], ends


@pytest.mark.quick
def test_a_rank_that_has_left_is_not_waited_for() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        introduce(store, rank, "contact")
    reports = ReportStore(store)
    threading.Timer(0.3, withdraw, (store, 1)).start()
    began = time.monotonic()
    assert reports.gather(0, [1], 60, lambda missing: False) == {}
    assert time.monotonic() - began < 5
    assert reports.contacts([0, 1]) == [(0, "contact")]


ZERO3 = """
import deepspeed
from transformers import GPT2Config, GPT2LMHeadModel
join()
torch.manual_seed(5)
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"comm_backend": backend, "train_batch_size": 4, "zero_optimization": zero}
shape = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2)
engine = deepspeed.initialize(model=GPT2LMHeadModel(shape), config=config)[0]
engine.eval()
tokens = torch.ones(1, 4, dtype=torch.long)
"""


def test_a_forward_pass_of_zero3_on_rank_0_only(tmp_path: Path) -> None:
    program = """
for _ in range(3):
    engine(tokens)
limit(2)
if rank == 0:
    engine(tokens)
else:
    time.sleep(60)
"""
    running = job(tmp_path, ZERO3 + program, imports=IMPORTS)
    sentence = why(end_after(running, (0,)))
    assert "only rank 0 (host-A) runs ZeRO-3 module transformer" in sentence
    assert "in time.sleep" in sentence
    assert "if rank == 0" in page(tmp_path)


# ---- the folder of a job's reports, which ranks make and remove beside one another


@pytest.mark.quick
def test_a_folder_that_another_rank_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path))
    made, left = Path.mkdir, [1, 2]

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if left and self.parent != tmp_path.parent:
            left.pop()
            self.rmdir()  # as the last rank of another group does

    monkeypatch.setattr(Path, "mkdir", mkdir)
    files = JobFiles("job", 0, "first")
    assert not left and list(files.folder.glob("running-*.json"))
    gone = [True, True]  # between mkdir() and this
    monkeypatch.setattr(Path, "is_dir", lambda self: not (gone and gone.pop()))
    JobFiles("job", 1, "first").close()
    files.close()
    assert not files.folder.exists()


@pytest.mark.quick
def test_each_start_of_a_job_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path))
    folders = set()
    for start in ("first", "second", "third"):
        ranks = [JobFiles("job", rank, start) for rank in range(2)]
        for files in ranks:
            files.write_dump(0, {"rank": files.rank})
        assert sorted(ranks[0].dumps(0)) == [0, 1]
        folders.add(ranks[0].report_folder(0))
        assert len(list(report_files.running())) == 2
        for files in ranks:
            files.close()
    assert len(folders) == 3


@pytest.mark.quick
def test_only_the_process_that_left_the_note_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one of another host, nor one that has got its number: SIGUSR2 would end it."""
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path))
    files = [JobFiles("job", rank, "first") for rank in range(2)]
    notes = sorted(files[0].folder.glob("running-*.json"))
    for path, key in zip(notes, ("host", "began"), strict=True):
        path.write_text(json.dumps({**json.loads(path.read_text()), key: "another"}))
    assert not list(report_files.running())
    assert [path.exists() for path in notes] == [True, False]


@pytest.mark.quick
def test_a_job_that_was_not_named_is_not_asked_where_several_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMDDP_REPORT_DIR", str(tmp_path))
    with pytest.raises(DumpError, match="no job over smddp runs"):
        report._choose("", list(report_files.running()))
    first = [JobFiles("job", rank, "first") for rank in (1, 0)]
    running = list(report_files.running())
    assert report._choose("", running).rank == report._choose("job", running).rank == 0
    second = JobFiles("job", 0, "second")
    running = list(report_files.running())
    for target in ("", "job"):
        with pytest.raises(
            DumpError, match=rf"several jobs run here: .*job \(process {os.getpid()}"
        ):
            report._choose(target, running)
    with pytest.raises(DumpError, match="no process or job 'another' runs here"):
        report._choose("another", running)
    with pytest.raises(DumpError, match="there is no folder /nosuch"):
        report._choose("/nosuch", running)
    for files in (*first, second):
        files.close()
