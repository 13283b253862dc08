"""Steps that end in every way, for the test of the runner."""

from __future__ import annotations

import os
import time

from gpu_check.step import NotHereError, Run


def good(run: Run, value: int) -> None:
    run.note("value", value)


def missed(run: Run) -> None:
    run.goal("fast", False, "slow")


def bad(run: Run) -> None:
    raise AssertionError("a sum is wrong\nsecond line")


def absent(run: Run) -> None:
    raise NotHereError("there is no switch")


def slow(run: Run) -> None:
    run.note("value", 7)
    time.sleep(60)


def dies(run: Run) -> None:
    os._exit(11)
