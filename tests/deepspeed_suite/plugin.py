"""Switches DeepSpeed's tests to another backend.

pytest loads this module as a plugin. The fork server that forks the ranks of DeepSpeed's tests
imports it as well, before it forks any rank. The import makes the switch, so that it applies in all
of them. ``__main__`` sets ``SMDDP_SUITE_BACKEND``, the name of the backend, and
``SMDDP_SUITE_GROUPS``, a file for one line per default process group that a rank makes: its
backend.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from tests import jobs

_SHARED_MEMORY = Path("/dev/shm")
_BACKEND = os.environ["SMDDP_SUITE_BACKEND"]
_GROUPS = Path(os.environ["SMDDP_SUITE_GROUPS"])
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
    # Tests of DeepSpeed up to 0.19.6 compare it; 0.19.8 has dropped sparse gradients and this name.
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def _free_port(*_: Any, **__: Any) -> str:
    """An unused port; DeepSpeed's own function starts at the default port of every job."""
    _ports.append(jobs.free_port())
    return str(_ports[-1])


_switch()


def pytest_configure(config: pytest.Config) -> None:
    multiprocessing.set_forkserver_preload([__name__])


def pytest_runtest_logfinish(nodeid: str) -> None:
    for port in _ports:  # DeepSpeed's shared-memory operation leaves 66 MiB per rank
        for left in _SHARED_MEMORY.glob(f"deepspeed_*_127.0.0.1_{port}_*"):
            left.unlink(missing_ok=True)
    _ports.clear()
