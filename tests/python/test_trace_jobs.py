"""``smddp trace`` of running jobs of four ranks on two hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.programs import Programs
from harness.training import IMPORTS
from test_reports import ZERO3, job, smddp
from test_trace import check_format, events

WAIT = """
print("ready", flush=True)
while not os.path.exists(__file__ + ".end"):
    time.sleep(0.05)
"""
ADAM = '"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, '
TRAIN = (
    ZERO3.replace("config = {", "config = {" + ADAM)
    + """
engine.train()
for _ in range(3):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
"""
)


def traced(tmp_path: Path, program: str, *options: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """What ``smddp trace`` says of a job that runs a program, and the trace."""
    program = f"__file__ = {str(tmp_path / 'train.py')!r}\n{program}{WAIT}"
    running: Programs = job(tmp_path, program, **more)
    try:
        for rank in range(4):
            running.wait_for(rank, "ready", 120)
        asked = str(running.processes[3].pid)
        said = smddp(tmp_path, "trace", asked, "-o", str(tmp_path / "trace.json"), *options)
    finally:
        (tmp_path / "train.py.end").touch()
        ends = running.end()
    assert [end.code for end in ends] == [0, 0, 0, 0], ends
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    return said, trace


def test_zero3_on_two_hosts(tmp_path: Path) -> None:
    said, trace = traced(tmp_path, TRAIN, imports=IMPORTS)
    assert "of ranks 0-3 on 2 hosts" in said
    assert "steps 2 to 3" in said
    host_b = trace["otherData"]["clocks"][1]
    assert host_b["host"] == "host-B"
    assert "round trips to rank 0" in host_b["from"]
    # Both hosts are this machine: the true offset is 0.
    assert abs(host_b["offset_ms"]) <= host_b["uncertainty_ms"]
    calls = []
    for rank in range(4):
        of = events(trace, "collective", rank)
        calls.append([(e["args"]["group"], e["args"]["seq"], e["name"]) for e in of])
        gathers = [e["args"] for e in of if "module transformer.h.1" in e["name"]]
        assert {args["operation"] for args in gathers} == {"all_gather"}
        gradients = [e["args"] for e in of if "gradients of module" in e["name"]]
        assert {args["operation"] for args in gradients} == {"reduce_scatter"}
        assert all(args["parameters"] for args in gradients)
        names = {name for args in gathers for name in args["parameters"]}
        assert "transformer.h.1.mlp.c_fc.weight" in names
        assert events(trace, "wait", rank)
        assert events(trace, "compute", rank)
        assert [e["name"] for e in events(trace, "step", rank)] == ["step 2", "step 3"]
    assert calls[0] == calls[1] == calls[2] == calls[3]
    assert len(calls[0]) > 50
