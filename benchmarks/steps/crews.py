"""How the ranks of each competitor are started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from hosts.competitors import Competitor, free_port, rank_environment
from hosts.crew import Crew
from hosts.field import ROOT, Field

from .workload import Workload, deepspeed_config

FREE = "fake"  # torch's backend that sends nothing
# glibc would give each large tensor's memory back to the kernel and fetch it again, page by page.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
START_SECONDS = 1200  # importing DeepSpeed takes a core for seconds; a rank that dies is noticed


class Trainers(Competitor):
    """One process per rank that trains over ``backend``: its name, and what is set in the
    environment of its ranks alone, as in ``smddp:SMDDP_SPIN_MICROSECONDS=20``."""

    scheme = ""  # how the state is divided
    program = ""  # of the ranks, in benchmarks/
    carries: tuple[str, ...] = ()  # kinds of collectives that no step goes without

    def __init__(
        self, backend: str, load: Workload, over: Mapping[str, Any], device: str, threads: int
    ) -> None:
        self.name = backend
        self.backend, *settings = backend.split(":")
        self.settings = dict(setting.split("=", 1) for setting in settings)
        self.load = load
        self.over = over
        self.device = device
        self.threads = threads
        self.parameters = 0

    def options(self) -> Mapping[str, Any]:
        """What the program is told beside the workload."""
        return self.over

    def environment(self, field: Field) -> dict[str, str]:
        return {}

    def start(self, field: Field) -> Crew:
        crew = Crew(self.name, field.folder / self.name.replace("/", "-"), field.ranks)
        try:
            self.launch(field, crew)
            told = crew.wait_until_ready(START_SECONDS)
            self.parameters = int(told["parameters"])
        except BaseException:
            crew.close()
            raise
        return crew

    def launch(self, field: Field, crew: Crew) -> None:
        program = ROOT / "benchmarks" / self.program
        options = json.dumps(self.options())
        port = str(free_port(field))
        for rank in range(field.ranks):
            host = field.host_of(rank)
            env = rank_environment(field, rank) | {
                **ALLOCATOR,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": str(self.threads),
                "HF_HUB_OFFLINE": "1",
                "GLOO_SOCKET_IFNAME": ",".join(host.interfaces),
                **self.environment(field),
                **self.settings,
            }
            argv = [sys.executable, str(program), self.backend, str(crew.folder)]
            argv += [self.load.text(), options]
            crew.launch(host, argv, env, f"rank{rank}")


class ZeroTrainers(Trainers):
    """With DeepSpeed's ZeRO-3; ``over`` is laid over its config."""

    scheme = "ZeRO-3"
    program = "zero3_rank.py"
    carries = ("gathered", "scattered")

    def options(self) -> Mapping[str, Any]:
        return deepspeed_config(self.load, self.backend, self.over)

    def environment(self, field: Field) -> dict[str, str]:
        return {
            "DS_ACCELERATOR": self.device,
            # Ranks of FREE each take themselves for rank 0: DeepSpeed's own shared memory, used
            # where all ranks are of one host, would wait for the others for ever.
            "LOCAL_SIZE": "0" if self.backend == FREE else str(field.ranks_per_host),
        }
