"""DDP and FSDP2: what their steps are, and who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .crews import Trainers
from .workload import Workload

DDP, FSDP2 = "DDP", "FSDP2"

# 12.9 million parameters, as ZeRO-3's. What goes ahead of the first gradient and after the last one
# can't be hidden, so DDP is bound by the network only where it is short beside the transfer.
WORKLOADS = {
    "communication": Workload("communication", 4, 512, 8, 256, sequence=16, batch=1),
    "balance": Workload("balance", 4, 512, 8, 256, sequence=128, batch=4),
}


@dataclass(frozen=True)
class Options:
    scheme: str
    bucket_mb: float | None = None  # DDP's bucket_cap_mb


class DataParallelTrainers(Trainers):
    """With torch's DDP or FSDP2."""

    program = "data_parallel_rank.py"

    def __init__(self, backend: str, load: Workload, options: Options, threads: int) -> None:
        over = {} if options == Options(options.scheme) else {"bucket_mb": options.bucket_mb}
        super().__init__(backend, load, over, "cpu", threads)
        self.scheme = options.scheme
        self.carries = ("reduced",) if options.scheme == DDP else ("gathered", "scattered")
        self._options = options

    def options(self) -> Mapping[str, Any]:
        return asdict(self._options)
