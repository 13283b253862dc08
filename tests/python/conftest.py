"""Fixtures that need DeepSpeed and transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.training import Trainer


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """A process that has imported both, and forks the ranks of each job."""
    trainer = Trainer()
    yield trainer
    trainer.close()
