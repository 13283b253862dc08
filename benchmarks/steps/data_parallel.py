"""DDP and FSDP2: their workloads, their options, and their competitors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.build import Build

from .trainers import Trainers
from .workload import Workload

DDP, FSDP2 = "DDP", "FSDP2"

# 12.9 million parameters, as in the "small" workload of ZeRO-3. The time before the first gradient
# and after the last one cannot overlap with communication, so the network bounds DDP only if this
# time is short compared with the transfer.
WORKLOADS = {
    "communication": Workload("communication", 4, 512, 8, 256, sequence=16, batch=1),
    "balance": Workload("balance", 4, 512, 8, 256, sequence=128, batch=4),
}


@dataclass(frozen=True)
class Options:
    scheme: str
    bucket_mb: float | None = None  # DDP's bucket_cap_mb
    dtype: str = "float32"  # of DDP's parameters and gradients


class DataParallelTrainers(Trainers):
    """torch's DDP or FSDP2."""

    program = "data_parallel_rank.py"

    def __init__(
        self, backend: str, build: Build, load: Workload, options: Options, threads: int
    ) -> None:
        usual = asdict(Options(options.scheme))
        over = {name: value for name, value in asdict(options).items() if value != usual[name]}
        super().__init__(backend, build, load, over, "cpu", threads)
        self.scheme = options.scheme
        self.carries = ("reduced",) if options.scheme == DDP else ("gathered", "scattered")
        self._options = options

    def options(self) -> Mapping[str, Any]:
        return asdict(self._options)
