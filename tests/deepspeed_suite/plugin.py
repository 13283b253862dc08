"""Switches DeepSpeed's tests to another backend, and logs the outcome of each test.

pytest loads this module as a plugin. The fork server that forks the ranks of DeepSpeed's tests
imports it as well, before it forks any rank. The import makes the switch, so that it applies in all
of them. :mod:`tests.deepspeed_suite.run` sets:

``SMDDP_SUITE_BACKEND``
    the name of the backend,
``SMDDP_SUITE_LOG``
    a file for one line of JSON per event; tests with an outcome in it do not run again,
``SMDDP_SUITE_GROUPS``
    a file for one line per default process group that a rank makes: its backend.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

_SHARED_MEMORY = Path("/dev/shm")

_BACKEND = os.environ["SMDDP_SUITE_BACKEND"]
_LOG = Path(os.environ["SMDDP_SUITE_LOG"])
_GROUPS = Path(os.environ["SMDDP_SUITE_GROUPS"])
_MESSAGE = 300  # characters
_ports: list[int] = []  # of the current test


def _switch() -> None:
    # unit.common.DistributedTest and other code that asks for the backend call this function.
    get_accelerator().communication_backend_name = lambda: _BACKEND
    from unit import common  # type: ignore[import-not-found]  # its classes read the name

    common.get_master_port = _free_port
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        with _GROUPS.open("a") as groups:
            groups.write(dist.get_backend() + "\n")

    dist.init_process_group = init_process_group


def _bridge_versions() -> None:
    # Tests of DeepSpeed up to 0.19.6 compare it; 0.19.8 has dropped sparse gradients and this name.
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def _free_port(*_: Any, **__: Any) -> str:
    """An unused port; DeepSpeed's own function starts at the default port of every job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _ports.append(probe.getsockname()[1])
    return str(_ports[-1])


_switch()
_bridge_versions()


def outcomes() -> dict[str, dict[str, Any]]:
    """The outcomes in the log, by test."""
    if not _LOG.exists():
        return {}
    events = map(json.loads, _LOG.read_text().splitlines())
    return {event["test"]: event for event in events if event["event"] == "outcome"}


def _write(event: str, **what: Any) -> None:
    with _LOG.open("a") as log:
        log.write(json.dumps({"event": event, **what}) + "\n")


class _Outcome:
    """The current test: pytest reports its set-up, its call and its teardown in order."""

    def __init__(self) -> None:
        self.outcome, self.message, self.seconds = "passed", "", 0.0

    def add(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if outcome == "passed" else "xfailed"
        elif outcome == "failed" and report.when != "call":
            outcome = "error"
        if outcome != "passed" and self.outcome == "passed":
            self.outcome, self.message = outcome, _reason(report)


_current = _Outcome()


def pytest_configure(config: pytest.Config) -> None:
    multiprocessing.set_forkserver_preload([__name__])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = outcomes()
    left_out = [item for item in items if item.nodeid in done]
    items[:] = [item for item in items if item.nodeid not in done]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    _write("collected", tests=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write("uncollected", where=report.nodeid, message=_reason(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    global _current
    _current = _Outcome()
    _ports.clear()
    _write("start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _current.add(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    done = _current
    _write(
        "outcome",
        test=nodeid,
        outcome=done.outcome,
        seconds=round(done.seconds, 2),
        message=done.message,
    )
    for port in _ports:  # DeepSpeed's shared-memory operation leaves 66 MiB per rank
        for left in _SHARED_MEMORY.glob(f"deepspeed_*_127.0.0.1_{port}_*"):
            left.unlink(missing_ok=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:_MESSAGE]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip()
    return " ".join(text.split())[:_MESSAGE]
