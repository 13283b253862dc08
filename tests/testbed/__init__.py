"""Several hosts on one machine, joined by links of a given rate.

    with Testbed(hosts=2, rate="1gbit") as bed:
        bed.hosts[1].run(["ping", "-c", "1", bed.hosts[0].addresses[0]], check=True)

``python -m tests.testbed --help`` shows the commands for the shell. Tests use the fixture
``testbed``.
"""

from .bed import Testbed
from .ceiling import Ceiling, ceiling
from .host import Host, TestbedError
from .launch import rank_environment, run_ranks, start_ranks

__all__ = [
    "Ceiling",
    "Host",
    "Testbed",
    "TestbedError",
    "ceiling",
    "rank_environment",
    "run_ranks",
    "start_ranks",
]
