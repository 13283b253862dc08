"""The harness itself: ports that test processes do not share, ranks forked from a server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import ports, server

PREAMBLE = "import atexit, os, sys, time\ncolour = 'red'"


def ask(program: str, size: int = 1, limit: float = 20, **env: str) -> list[dict[str, Any]]:
    envs = [{"PATH": os.environ["PATH"], "RANK": str(rank), **env} for rank in range(size)]
    job = {"program": program, "size": size, "envs": envs, "limit": limit}
    answers: list[dict[str, Any]] = server.with_imports(PREAMBLE).ask(job)
    return answers


def test_ports_are_free_and_differ_between_test_processes() -> None:
    mine = {ports.free_port() for _ in range(20)}
    assert len(mine) == 20
    for port in mine:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    program = "from harness.ports import free_port; print(free_port())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    block = {port // ports.BLOCK for port in mine}
    assert len(block) == 1 and int(other.stdout) // ports.BLOCK not in block


def test_a_port_in_use_is_not_handed_out() -> None:
    first = ports.free_port()
    while first % ports.BLOCK > ports.BLOCK - 5:  # the next ones are of the same block
        first = ports.free_port()
    taken = [socket.create_server(("127.0.0.1", first + i)) for i in (1, 2)]
    assert ports.free_port() == first + 3
    for listening in taken:
        listening.close()


def test_ranks_of_a_program_have_the_imports_and_their_own_environment() -> None:
    answers = ask("print(colour, os.environ['RANK'], os.environ.get('HOME'))", size=2)
    assert [answer["output"] for answer in answers] == ["red 0 None\n", "red 1 None\n"]
    assert [answer["code"] for answer in answers] == [0, 0]


def test_a_program_ends_as_an_interpreter_does() -> None:
    (answer,) = ask("atexit.register(lambda: print('handler'))\nsys.exit(3)")
    assert answer == {"code": 3, "output": "handler\n"}
    (answer,) = ask("raise LookupError('its own trouble')")
    assert answer["code"] == 1 and "LookupError: its own trouble" in answer["output"]
    (answer,) = ask("os.kill(os.getpid(), 9)")
    assert answer["code"] == -9


def test_a_late_rank_is_killed_and_the_next_job_runs() -> None:
    (answer,) = ask("print('begun', flush=True)\ntime.sleep(60)", limit=0.5)
    assert answer == {"code": None, "output": "begun\n"}
    assert ask("print(1)")[0]["output"] == "1\n"


def test_ranks_that_wait_for_a_failed_one_have_a_few_seconds() -> None:
    answers = ask("sys.exit(7) if os.environ['RANK'] == '0' else time.sleep(60)", 2, 60)
    assert [answer["code"] for answer in answers] == [7, None]


def test_a_server_that_failed_is_replaced() -> None:
    with pytest.raises(AssertionError, match="the server ended"):
        server.with_imports(PREAMBLE).ask({"no": "job"})
    assert ask("print(2)")[0]["output"] == "2\n"


@pytest.mark.parametrize(("choice", "alone"), [("skip", False), ("only", True)])
def test_tests_that_must_run_alone_are_told_apart(choice: str, alone: bool) -> None:
    files = [str(Path(__file__).parent / name) for name in ("test_wire_bytes.py", "test_walls.py")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--alone", choice, *files]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert ("test_wire_bytes.py::" in found) == alone
    assert ("test_walls.py::" in found) != alone


def test_cases_of_a_test_run_in_one_process() -> None:
    file = str(Path(__file__).parent / "test_scratch.py")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", file]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    ran = re.findall(r"\[(gw\d)\] .* PASSED tests/python/test_scratch.py::(\w+)\[", said)
    assert len(ran) > 6, said
    assert len(set(ran)) == len({name for _, name in ran}), ran
