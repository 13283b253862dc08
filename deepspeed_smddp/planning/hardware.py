"""GPUs and clusters: what the manufacturers state. Prices are the user's to give.

Sources: NVIDIA's data sheets of A100 (2021), H100 (2023), H200 (2024) and of DGX B200 (2024), dense
figures without sparsity; the instance tables of Amazon EC2 P4, P5 and P6. The H100 with 96 GB of
HBM2e and a limit of 500 W is that of torchtitan's published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_smddp.planning import PlanError


@dataclass(frozen=True)
class Gpu:
    """One GPU: FLOP/s, bytes, bytes per second; NVLink's rate is that of one direction.

    ``generation`` picks the fitted constants: "a100", "h100", "h100-500w" or "b200".
    """

    name: str
    half_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_rate: float
    nvlink_rate: float
    generation: str

    @property
    def architecture(self) -> str:
        """ "a100", "h100" or "b200": what NVLink's constants go by."""
        return self.generation.split("-")[0]

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of a matrix product in this precision; without FP8 units, as bf16."""
        return self.fp8_flops if precision == "fp8" and self.fp8_flops else self.half_flops


GPUS = {
    "a100-40": Gpu("a100-40", 312e12, 0, 40e9, 1.555e12, 300e9, "a100"),
    "a100-80": Gpu("a100-80", 312e12, 0, 80e9, 2.039e12, 300e9, "a100"),
    "h100": Gpu("h100", 989e12, 1979e12, 80e9, 3.35e12, 450e9, "h100"),
    "h100-500w": Gpu("h100-500w", 989e12, 1979e12, 96e9, 2.4e12, 450e9, "h100-500w"),
    "h200": Gpu("h200", 989e12, 1979e12, 141e9, 4.8e12, 450e9, "h100"),
    "b200": Gpu("b200", 2250e12, 4500e12, 180e9, 8e12, 900e9, "b200"),
}


@dataclass(frozen=True)
class Cluster:
    """Hosts of one kind. ``network_rate`` is bytes per second of a host's NICs, one direction.

    ``efa``: the network is Amazon's EFA, for which NCCL has constants of its own.
    ``price`` is per host and hour, 0 if it is not known.
    """

    name: str
    gpu: Gpu
    gpus_per_host: int
    network_rate: float
    efa: bool = False
    price: float = 0.0


def gbit(rate: float) -> float:
    """Bytes per second of so many Gbit/s."""
    return rate * 1e9 / 8


CLUSTERS = {
    "p4d": Cluster("p4d", GPUS["a100-40"], 8, gbit(400), efa=True),
    "p4de": Cluster("p4de", GPUS["a100-80"], 8, gbit(400), efa=True),
    "p5": Cluster("p5", GPUS["h100"], 8, gbit(3200), efa=True),
    "p5en": Cluster("p5en", GPUS["h200"], 8, gbit(3200), efa=True),
    "p6-b200": Cluster("p6-b200", GPUS["b200"], 8, gbit(3200), efa=True),
}


def cluster(name: str, network_gbit: float = 0) -> Cluster:
    """A cluster of the list, or hosts with 8 GPUs of the list and a network of so many Gbit/s.

    Raises:
        PlanError: neither list has the name, or a GPU was named without a network.
    """
    key = name.strip().lower()
    if key in CLUSTERS:
        known = CLUSTERS[key]
        return replace(known, network_rate=gbit(network_gbit)) if network_gbit else known
    if key not in GPUS:
        raise PlanError(
            f"{name} is no cluster that smddp plan knows; it knows {', '.join(CLUSTERS)}, and the "
            f"GPUs {', '.join(GPUS)} with --network"
        )
    if not network_gbit > 0:
        raise PlanError(f"{name} is a GPU: say with --network how many Gbit/s a host has")
    return Cluster(key, GPUS[key], 8, gbit(network_gbit))
