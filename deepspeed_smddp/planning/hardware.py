"""GPUs and clusters: ``hardware.json``, and a file of the user's in the same form.

Sources of the table: NVIDIA's data sheets, dense figures without sparsity; the instance tables of
Amazon EC2 P4, P5 and P6. "matmul": the best product measured (github.com/stas00/ml-engineering);
"attention": FlashAttention-2's paper (A100) and FlashAttention-3's (FlashAttention-2 on H100). The
H100 with 96 GB and a limit of 500 W is that of torchtitan's published runs: its clock is taken to
follow the cube root of its power. "memory_gb" is what torch reports, of 2 ** 30 bytes a unit on
the data sheet. "link_gbps" is one direction of NVLink; where there is none, half of PCIe 4.0's 32,
as data crosses it twice. "network_share" of P4: 30 of 50 GB/s between 3 and 4
hosts, NVIDIA/nccl issue 527; else 96 of 100, 90 % on average, NVIDIA/nccl-tests issue 119.
"memory_gb" is torch's "total capacity", as reports of memory that ran out have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_smddp.planning import PlanError

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""


class Gpu(_Entry):
    """One GPU. ``matmul``, ``attention``: shares of the peak that products and fused attention
    reach alone; the defaults are of no measurement."""

    half_tflops: _Positive
    fp8_tflops: Annotated[float, Field(ge=0)] = 0
    memory_gb: _Positive
    memory_gbps: _Positive
    link_gbps: _Positive = 16
    matmul: _Share = 0.8
    attention: _Share = 0.4

    @property
    def memory_bytes(self) -> float:
        """Of its memory."""
        return self.memory_gb * 1e9

    @property
    def memory_rate(self) -> float:
        """Bytes per second of its memory."""
        return self.memory_gbps * 1e9

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of a matrix product in this precision; without FP8 units, as bf16."""
        return 1e12 * ((precision == "fp8" and self.fp8_tflops) or self.half_tflops)


class Cluster(_Entry):
    """Hosts of one kind. ``network_gbit`` is of a host's NICs, one direction.

    ``network_share``: what NCCL reaches of it with few ranks. ``measured_gbit``: of a host, by an
    AllGather between hosts that ``smddp bench`` timed, by library. ``price`` is per host and hour,
    0 if it is not known.
    """

    gpu: Gpu
    gpus_per_host: Annotated[int, Field(ge=1)] = 8
    network_gbit: Annotated[float, Field(ge=0)] = 0
    network_share: _Share = 0.9
    measured_gbit: Mapping[str, float] = {}
    price: float = 0

    @property
    def network_rate(self) -> float:
        """Bytes per second of a host's NICs, one direction."""
        return gbit(self.network_gbit)

    def having(self, **changes: object) -> Cluster:
        """The same hosts with other values."""
        return self.model_copy(update=changes)


def gbit(rate: float) -> float:
    """Bytes per second of so many Gbit/s."""
    return rate * 1e9 / 8


class _ClusterEntry(_Entry):
    gpu: str
    gpus_per_host: Annotated[int, Field(ge=1)] = 8
    network_gbit: _Positive
    network_share: _Share = 0.9


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: dict[str, Gpu] = {}
    clusters: dict[str, _ClusterEntry] = {}


@cache
def _built_in() -> _Table:
    file = resources.files("deepspeed_smddp.planning").joinpath("hardware.json")
    return _Table.model_validate_json(file.read_text("utf-8"))


def table(path: Path | None = None) -> tuple[dict[str, Gpu], dict[str, Cluster]]:
    """GPUs and clusters of the package and of the user's file, whose names go first.

    Raises:
        PlanError: the file is not of this form, or a cluster has a GPU that is not in the list.
    """
    found = _built_in()
    if path is not None:
        try:
            own = _Table.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise PlanError(f"{path} is no table of hardware: {_first(error)}") from None
        found = _Table(gpus=found.gpus | own.gpus, clusters=found.clusters | own.clusters)
    gpus = {name: gpu.model_copy(update={"name": name}) for name, gpu in found.gpus.items()}
    clusters = {}
    for name, of in found.clusters.items():
        if of.gpu not in gpus:
            raise PlanError(f"the cluster {name} has GPUs {of.gpu}; known are {', '.join(gpus)}")
        clusters[name] = Cluster(**of.model_dump() | {"name": name, "gpu": gpus[of.gpu]})
    return gpus, clusters


def _first(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    one = error.errors()[0]
    return f"{'.'.join(map(str, one['loc'])) or 'its text'}: {one['msg']}"


GPUS, CLUSTERS = table()


def cluster(
    name: str, network_gbit: float = 0, gpus_per_host: int = 0, path: Path | None = None
) -> Cluster:
    """A cluster of the list, or hosts with so many GPUs (0: 8) and Gbit/s of a GPU of the list.

    Raises:
        PlanError: neither list has the name, or a number is below 0.
    """
    gpus, clusters = table(path)
    key = name.strip().lower()
    if network_gbit < 0 or gpus_per_host < 0:
        raise PlanError("--network and --gpus-per-host are numbers above 0")
    changes = {"network_gbit": network_gbit, "gpus_per_host": gpus_per_host}
    given = {option: value for option, value in changes.items() if value}
    if key in clusters:
        return clusters[key].having(**given)
    if key not in gpus:
        raise PlanError(
            f"{name} is no cluster that smddp plan knows; it knows {', '.join(clusters)}, and the "
            f"GPUs {', '.join(gpus)} with --network, and takes others in a file by --hardware"
        )
    return Cluster(name=key, gpu=gpus[key], **given)
