"""The exception that a testbed raises."""

from __future__ import annotations


class TestbedError(RuntimeError):
    """The testbed could not be built, used or changed; the message says what failed."""

    __test__ = False  # not a test case, although the name starts with Test
