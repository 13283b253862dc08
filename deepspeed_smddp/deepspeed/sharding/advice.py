"""Suggests a degree, once, for a model that is small for the number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import comm_backend

PARAMETERS_PER_HOST = 3_000_000_000


def suggested_degree(parameters: int, ranks: int, ranks_per_host: int) -> int:
    """A degree for a model that is small for its number of ranks; 0: shard over all ranks.

    The rule of thumb of SageMaker's sharded data parallelism: one host per 3 billion parameters.

    Args:
        parameters: elements of the model's parameters.
        ranks: the number of data-parallel ranks.
        ranks_per_host: the number of these ranks on each host.
    """
    hosts = max(1, math.ceil(parameters / PARAMETERS_PER_HOST))
    for degree in range(hosts * ranks_per_host, ranks, ranks_per_host):
        if ranks % degree == 0:
            return degree
    return 0


def suggest(model: Any, config: Mapping[str, Any]) -> None:
    """Logs a degree on rank 0, if the job uses smddp and ZeRO-3 and no degree is set."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if (
        not comm_backend.serves_default_group()
        or settings.current().source("sharded_data_parallel_degree") != settings.DEFAULT
        or ds_config.at(config, "zero_optimization.stage") != 3
        or not local.isdigit()
        or not hasattr(model, "parameters")
    ):
        return
    ranks = dist.get_world_size()
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    degree = suggested_degree(parameters, ranks, max(1, int(local)))
    if degree:
        from deepspeed.utils import log_dist

        log_dist(
            f"smddp: {parameters:.3g} parameters are few for {ranks} ranks; "
            f'"sharded_data_parallel_degree": {degree} (one host per 3 billion parameters) would '
            f"keep each copy of the state, and its gathers, on {degree // max(1, int(local))} "
            "host(s)",
            ranks=[0],
        )
