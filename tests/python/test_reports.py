"""Jobs of four ranks on two hosts that hang: the page says which rank it is, and what it does instead."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from harness.programs import Ended, Programs, run
from harness.world import BACKEND

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="reports are smddp's")

LAYOUT = "AABB"
SECONDS = 3  # the operations' deadline
START = """
join()
x, y = torch.ones(1000), torch.ones(4000)
dist.all_reduce(x)
"""
GATHER = "dist.all_gather_into_tensor(y, x)\n"


def environment(folder: Path, seconds: float = SECONDS) -> dict[str, str]:
    return {
        "SMDDP_REPORT": "1",
        "SMDDP_REPORT_DIR": str(folder),
        "SMDDP_TIMEOUT_SECONDS": str(seconds),
        "SMDDP_SILENCE_SECONDS": "4",
    }


def why(ends: list[Ended]) -> str:
    """The sentence after "Why:" on the one page that a rank printed."""
    pages = [end.errors for end in ends if "Why: " in end.errors]
    assert len(pages) == 1, "\n".join(f"rank {end.rank}:\n{end.errors}" for end in ends)
    sentence = re.search(r"Why: (.*?)\n\n", pages[0], re.DOTALL)
    assert sentence is not None
    return re.sub(r"\s+", " ", sentence[1])


def page_of(tmp_path: Path, program: str, seconds: float = SECONDS) -> str:
    return why(run(LAYOUT, START + program, env=environment(tmp_path, seconds)))


def instead(statement: str) -> str:
    """A program whose rank 3 runs a statement where the others gather."""
    return f"if rank == 3:\n    {statement}\n{GATHER}"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("time.sleep(60)", "in time.sleep"),
        ("import io; torch.save(x, type('F', (io.BytesIO,), {'write': lambda s, b: time.sleep(60)})())",
         "in torch.save"),
        ("next(iter(torch.utils.data.DataLoader([0], collate_fn=lambda b: time.sleep(60))))",
         "DataLoader"),
        ("os.dup2(os.pipe()[0], 0); breakpoint()", "breakpoint"),
    ],
    ids=["sleep", "save", "dataloader", "breakpoint"],
)
def test_a_rank_that_does_something_else(tmp_path: Path, statement: str, words: str) -> None:
    text = page_of(tmp_path, instead(statement))
    assert "rank 3 (" in text
    assert words in text
    assert "has not called all_gather #2" in text
    assert "ranks 0-2 wait" in text


def test_a_rank_that_skips_a_collective(tmp_path: Path) -> None:
    text = page_of(tmp_path, f"if rank != 2:\n    {GATHER}time.sleep(20)")
    assert "rank 2 (" in text
    assert "all_gather #2" in text


def test_another_size(tmp_path: Path) -> None:
    program = "n = 500 if rank == 1 else 1000\ndist.all_gather_into_tensor(y[:4 * n], x[:n])"
    text = page_of(tmp_path, program)
    assert "another size" in text
    assert "rank 1" in text


def test_two_groups_in_another_order(tmp_path: Path) -> None:
    program = """
a, b = dist.new_group(range(4)), dist.new_group(range(4))
for group in (a, b) if rank != 3 else (b, a):
    dist.all_reduce(x, group=group)
"""
    text = page_of(tmp_path, program)
    assert "in another order" in text


@pytest.mark.parametrize(("number", "words"), [("SIGKILL", "ended"), ("SIGSTOP", "answered")])
def test_a_rank_that_is_gone(tmp_path: Path, number: str, words: str) -> None:
    job = Programs(
        LAYOUT, START + "print('ready', flush=True)\n" + instead("time.sleep(60)"),
        env=environment(tmp_path, 60),
    )
    job.wait_for(3, "ready")
    os.kill(job.processes[3].pid, getattr(signal, number))
    try:
        for rank in range(3):
            job.processes[rank].wait()
    finally:
        ends = job.end(limit=0)
    text = why(ends[:3])
    assert "rank 3 (" in text
    assert words in text


def test_a_signal_asks_for_a_report_and_nothing_ends(tmp_path: Path) -> None:
    program = START + (
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end: time.sleep(0.05)\n"
        "dist.all_reduce(x)\n"
    )
    job = Programs(LAYOUT, program, env=environment(tmp_path, 60))
    for rank in range(4):
        job.wait_for(rank, "ready")
    os.kill(job.processes[2].pid, signal.SIGUSR2)
    ends = job.end()
    assert [end.code for end in ends] == [0, 0, 0, 0]
    assert "time.sleep" in "".join(end.errors for end in ends)
    why(ends)
    assert len(list(tmp_path.rglob("rank-*.json"))) == 4
    assert len(list(tmp_path.rglob("page.txt"))) == 1


def test_nothing_is_left_without_trouble(tmp_path: Path) -> None:
    ends = run(LAYOUT, START, env=environment(tmp_path / "reports"))
    assert all(end.code == 0 for end in ends)
    assert not (tmp_path / "reports").exists()


ZERO3 = """
import deepspeed, transformers
join()
torch.manual_seed(5)
with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}, "train_batch_size": 4}):
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    )
engine = deepspeed.initialize(model=model, config={
    "comm_backend": backend, "train_batch_size": 4, "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0}})[0]
engine.eval()
tokens = torch.ones(1, 4, dtype=torch.long)
"""


def zero3_page(tmp_path: Path, program: str) -> str:
    env = {**environment(tmp_path, 5), "DS_ACCELERATOR": "cpu"}
    imports = "import torch, torch.distributed, deepspeed, transformers"
    return why(run(LAYOUT, ZERO3 + program, env=env, imports=imports))


def test_zero3_a_forward_pass_on_rank_0_only(tmp_path: Path) -> None:
    text = zero3_page(tmp_path, "if rank == 0:\n    engine(tokens)\nelse:\n    time.sleep(60)\n")
    assert "rank 0 waits" in text
    assert "module transformer" in text
    assert "time.sleep" in text
    assert "if rank == 0" in text


def test_zero3_a_rank_that_generates_fewer_tokens(tmp_path: Path) -> None:
    program = """
new = 2 if rank == 3 else 6
engine.module.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                       pad_token_id=0, eos_token_id=63, synced_gpus=False)
dist.barrier()
"""
    text = zero3_page(tmp_path, program)
    assert "rank 3" in text
    assert "synced_gpus=True" in text
