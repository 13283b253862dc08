"""What a testbed raises."""

from __future__ import annotations


class TestbedError(RuntimeError):
    """The testbed could not be built, used or changed; the text says what failed."""

    __test__ = False  # no test case, whatever pytest makes of the name
