"""The workload of a step: model, tokens, DeepSpeed config, and its least bytes and operations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A GPT-NeoX of these dimensions, trained on ``batch`` sequences per rank and step."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int  # tokens
    batch: int  # sequences per rank

    @property
    def tokens(self) -> int:
        """Per rank and step."""
        return self.batch * self.sequence

    @property
    def layer_parameters(self) -> int:
        """Of the four matrices of one layer, whose MLP is four times as wide as the layer."""
        return 12 * self.hidden**2

    def model_flop(self) -> float:
        """Floating-point operations of forward and backward pass on one rank's tokens.

        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM" (SC'21), appendix, without recomputed activations:
        72 B s l h^2 (1 + s / 6h + V / 12lh), of matrix products alone.
        """
        layers, hidden = self.layers, self.hidden
        beside = 1 + self.sequence / (6 * hidden) + self.vocabulary / (12 * layers * hidden)
        return 72 * self.tokens * layers * hidden**2 * beside

    def text(self) -> str:
        return json.dumps(asdict(self))


# The first has 28.3 million parameters in its layers and 0.4 million others: small enough for a
# step of two thirds of a second on links of 1 Gbit/s, and large enough that the links bound the
# step, not the time of DeepSpeed's Python per module. The other two have 12.6 and 0.3 million: in
# the second, the time of that Python has a larger share; the third has so many tokens that
# computing bounds it.
WORKLOADS = {
    "communication": Workload("communication", 4, 768, 12, 256, sequence=64, batch=1),
    "small": Workload("small", 4, 512, 8, 256, sequence=64, batch=1),
    "compute": Workload("compute", 4, 512, 8, 256, sequence=256, batch=8),
}


def resized(load: Workload, **given: int | None) -> Workload:
    """The workload with the given dimensions; None keeps a dimension."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not changes:
        return load
    return replace(load, name=f"{load.name}*", **changes)


def deepspeed_config(load: Workload, backend: str, over: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO-3 in bf16; ``over`` overrides it, section by section.

    The models that ZeRO-3 is for are large compared with DeepSpeed's defaults: buckets of 5e7 to
    5e8 elements, and parameters that are reused within 1e9 stay gathered. The settings here have
    the same proportion to this model: a layer is gathered while the layer before it computes, and
    is gathered again for the backward pass.
    """
    layer = load.layer_parameters
    config: dict[str, Any] = {
        "comm_backend": backend,
        "train_micro_batch_size_per_gpu": load.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        # Fused: one pass over the states, as in DeepSpeed's own Adam for GPUs and for offloading.
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True, "lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 2 * layer,
            "stage3_max_reuse_distance": 0,
        },
        "steps_per_print": 1_000_000_000,
    }
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    return config


def wire_bytes(gathered: float, scattered: float, reduced: float, hosts: int) -> float:
    """Least bytes that cross one host's interface in each direction, whatever the algorithm.

    ``gathered``: bytes of the outputs of all AllGathers; ``scattered``: of the inputs of all
    ReduceScatters; ``reduced``: of the buffers of all AllReduces. See ``calls.cases.lower_bound``.
    """
    return (gathered + scattered + 2 * reduced) * (hosts - 1) / hosts
