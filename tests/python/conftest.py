"""Fixtures that need DeepSpeed and transformers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import server
from harness.training import Trainer


@pytest.fixture(scope="session")
def trainer() -> Trainer:
    """Jobs whose ranks are forked from a process that has imported both."""
    return Trainer()


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    """Ends the processes that forked ranks; each started when a test first needed it."""
    yield
    server.close_all()


# All ranks of a job have opened the buffers by then, and need their names no longer.
_STARTED_SECONDS = 60


@pytest.fixture(autouse=True)
def deepspeed_buffers() -> Iterator[None]:
    """Removes the buffers of 66 MiB that each DeepSpeed rank on CPUs leaves in /dev/shm."""
    yield
    for buffer in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
        with contextlib.suppress(OSError):  # another process removes it, or owns it
            if buffer.stat().st_mtime < time.time() - _STARTED_SECONDS:
                buffer.unlink()
