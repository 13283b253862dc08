"""Dumps of ranks as files that torch's own analyzer of flight recorders reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deepspeed_smddp.diagnostics.report import fr_trace
from harness.dumps import MIB, Rank


def analyze(folder: Path, *options: str) -> str:
    """What torch's analyzer prints about the files in a folder."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.flight_recorder.fr_trace",
            "--prefix",
            fr_trace.PREFIX,
            *options,
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_rank_that_has_not_called_is_reported(tmp_path: Path) -> None:
    dumps = {r: Rank(r, 4).call().wait("all_reduce").dump() for r in range(3)}
    dumps[3] = Rank(3, 4).call().dump()
    fr_trace.write(dumps, tmp_path)
    text = analyze(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2" in text
    assert "missing ranks: {3}" in text


def test_matching_operations_report_nothing(tmp_path: Path) -> None:
    groups = {"default": [0, 1, 2, 3], "even": [0, 2], "odd": [1, 3]}
    dumps = {}
    for rank in range(4):
        mine = {n: m for n, m in groups.items() if rank in m}
        calls = Rank(rank, 4, mine).call("broadcast").call().call("barrier", bytes=0, dtype="")
        if rank % 2:
            calls.call(group="odd")
        calls.call(group="odd" if rank % 2 else "even").call("all_to_all").call("invented")
        # An odd number of bytes, which the members can't share evenly.
        dumps[rank] = calls.call("reduce_scatter", bytes=1001, dtype="").dump()
    del dumps[1].operations[:2]  # a ring that has lost the oldest operations
    fr_trace.write(dumps, tmp_path)
    text = analyze(tmp_path)
    for word in ("has errors", "Not all ranks", "mismatch", "cannot decide"):
        assert word not in text


def test_the_label_stands_where_the_stack_would(tmp_path: Path) -> None:
    dumps = {r: Rank(r, 2).wait(label="FSDP2 module layers.1").dump() for r in range(2)}
    entry = fr_trace.traces(dumps)[0]["entries"][0]
    assert entry["frames"][0]["name"] == "FSDP2 module layers.1"
    assert entry["state"] == "started"
    assert entry["input_sizes"] == [[MIB // 2]]
    assert entry["output_sizes"] == [[MIB]]
