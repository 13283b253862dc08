"""Fixtures that need DeepSpeed and transformers."""

from __future__ import annotations

from collections.abc import Iterator

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
