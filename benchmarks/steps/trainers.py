"""The competitors of a training step: how the ranks that train over a backend are started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.build import Build
from shared.competitor import Competitor, free_port, rank_environment
from shared.host_set import ROOT, HostSet
from shared.launched_ranks import LaunchedRanks

from .workload import Workload, deepspeed_config

OURS = "smddp"
FREE = "fake"  # torch's backend that sends nothing
# Otherwise glibc returns the memory of each large tensor to the kernel and fetches it again, page
# by page.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
START_SECONDS = 1200  # importing DeepSpeed takes seconds of a core; a rank that dies is noticed


class Trainers(Competitor):
    """One process per rank that trains over ``backend``.

    ``backend`` is a name, and variables that are set in the environment of these ranks alone, as in
    ``smddp:SMDDP_DEBUG=spin_microseconds=20``.
    """

    scheme = ""  # how the state is divided
    program = ""  # of the ranks, in benchmarks/
    carries: tuple[str, ...] = ()  # kinds of collectives that every step calls

    def __init__(
        self,
        backend: str,
        build: Build,
        load: Workload,
        over: Mapping[str, Any],
        device: str,
        threads: int,
    ) -> None:
        self.name = f"{backend}{build.suffix}"
        self.build = build
        self.backend, *settings = backend.split(":")
        self.settings = dict(setting.split("=", 1) for setting in settings)
        self.load = load
        self.over = over
        self.device = device
        self.threads = threads

    def missing(self, hosts: HostSet) -> str | None:
        return self.build.missing_package()

    def start_timeout(self, hosts: HostSet) -> float:
        return START_SECONDS

    def options(self) -> Mapping[str, Any]:
        """Arguments of the program besides the workload."""
        return self.over

    def environment(self, hosts: HostSet) -> dict[str, str]:
        return {}

    def launch(self, hosts: HostSet, ranks: LaunchedRanks) -> None:
        program = ROOT / "benchmarks" / self.program
        argv = [str(self.build.python), str(program), self.backend, str(ranks.folder)]
        argv += [self.load.text(), json.dumps(self.options())]
        port = str(free_port(hosts))
        for rank in range(hosts.ranks):
            host = hosts.host_of(rank)
            env = rank_environment(hosts, rank) | {
                **ALLOCATOR,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": str(self.threads),
                "HF_HUB_OFFLINE": "1",
                "GLOO_SOCKET_IFNAME": ",".join(host.interfaces),
                **self.environment(hosts),
                **self.settings,
            }
            ranks.launch(host, argv, env, f"rank{rank}")


class ZeroTrainers(Trainers):
    """DeepSpeed's ZeRO-3; ``over`` overrides parts of its config."""

    scheme = "ZeRO-3"
    program = "zero3_rank.py"
    carries = ("gathered", "scattered")

    def options(self) -> Mapping[str, Any]:
        return deepspeed_config(self.load, self.backend, self.over)

    def environment(self, hosts: HostSet) -> dict[str, str]:
        return {
            "DS_ACCELERATOR": self.device,
            # Each rank of FREE takes itself for rank 0. DeepSpeed's own shared memory, which it
            # uses if all ranks are on one host, would wait for the other ranks for ever.
            "LOCAL_SIZE": "0" if self.backend == FREE else str(hosts.ranks_per_host),
        }
