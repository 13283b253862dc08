"""One sentence for each feature of a DeepSpeed config whose data smddp does not move in its way.

The run is right with all of them; a user who compares speeds has to know what is compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepspeed_smddp.config import ds_json as ds_config

_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")

# What happens if the config sets a key. Read in the sources of DeepSpeed 0.16.5 and 0.19.8.
_OF_KEYS = {
    "compile.deepcompile": "compiled graphs gather and reduce over an NCCL communicator of "
    "DeepSpeed's own, past smddp, which carries the rest",
    "zero_optimization.zero_quantized_weights": "smddp gathers the quantized weights of a bucket "
    "as one tensor, with DeepSpeed's copies",
    "zero_optimization.zero_quantized_nontrainable_weights": "smddp gathers these weights of a "
    "bucket as one tensor, with DeepSpeed's copies",
    "zero_optimization.zero_quantized_gradients": "gradients travel by all_to_all, which NCCL "
    "carries out on GPUs",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "parameters are fetched by smddp's "
    "AllReduce, which sends twice the bytes of AllGather",
    "zero_optimization.zenflow": "smddp does not overlap the reductions of gradients; on GPUs the "
    "columns that stages 1 and 2 broadcast go to NCCL",
    "zero_optimization.offload_optimizer.super_offload": "smddp does not overlap the reductions of "
    "gradients, as SuperOffload ends them itself",
}


def sentences(config: Mapping[str, Any]) -> list[str]:
    """What goes past smddp with this config."""
    found = {f'"{key}"': of for key, of in _OF_KEYS.items() if ds_config.at(config, key)}
    if ds_config.at(config, "expert_parallel.comm_backend") == "deepep":
        name = '"expert_parallel.comm_backend": "deepep"'
        found[name] = "DeepEP moves the tokens between experts, past smddp"
    if os.environ.get("DS_SDMA_ALLGATHER") == "1":
        found["DS_SDMA_ALLGATHER=1"] = (
            "DeepSpeed gathers over all ranks by mori where it finds it, past smddp"
        )
    if str(ds_config.at(config, "optimizer.type")).lower() in _ONE_BIT:
        found["a 1-bit optimizer"] = (
            "compressed gradients travel by all_to_all, which NCCL carries out on GPUs"
        )
    return [f"smddp: with {name}, {effect}" for name, effect in found.items()]
