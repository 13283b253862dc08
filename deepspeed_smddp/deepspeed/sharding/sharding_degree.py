"""``"sharded_data_parallel_degree"``: what it changes in ``initialize`` and in ``zero.Init``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed.sharding.shard_groups import KEY, Sharding, asked_degree
from deepspeed_smddp.deepspeed.sharding.sharded_checkpoint import ShardCheckpoints
from deepspeed_smddp.errors import SmddpConfigError, warn_once
from deepspeed_smddp.upstream import source
from deepspeed_smddp.upstream.wrapping import Call, replaced

_FEATURE = "sharded_data_parallel_degree"
PARAMETERS_PER_HOST = 3_000_000_000
# Features of stage 3 that make groups of their own: the path in the config, and the values with
# which the feature is off.
_EXCLUDED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("zero_optimization.zero_hpz_partition_size", (None, 1)),
    ("zero_optimization.mics_shard_size", (None, -1)),
    ("zero_optimization.zero_quantized_gradients", (None, False)),
    ("zero_optimization.zenflow", (None,)),
    ("zero_optimization.offload_optimizer.super_offload", (None, False)),
    ("expert_parallel.enabled", (None, False)),
    ("compile.deepcompile", (None, False)),
)


@contextmanager
def sharded(call: Call, config: Mapping[str, Any]) -> Iterator[None]:
    """Around ``initialize``: an engine on shard groups; suggests a degree if none is asked for.

    Raises:
        SmddpConfigError: the DeepSpeed version or the config does not go with a degree, or the
            degree does not divide the data-parallel ranks.
    """
    degree = asked_degree()
    if degree == 0:
        _suggest(call.arguments.get("model"), config)
    if degree in (0, dist.get_world_size()):
        yield
        engine = call.result[0]
        if degree:
            Sharding.within(engine.seq_data_parallel_group)  # raises if it has fewer ranks
        _attach_checkpoints(engine, None)
        return
    _check_version()
    check_config(config)
    from deepspeed.runtime.zero import stage3

    # It derives from DeepSpeed's stage 3, so its import imports DeepSpeed.
    from deepspeed_smddp.deepspeed.sharding import sharded_stage3

    # The engine looks its optimizer up in DeepSpeed's module.
    with replaced(stage3, "DeepSpeedZeroOptimizer_Stage3", sharded_stage3.ShardedStage3):
        yield
    engine = call.result[0]
    _attach_checkpoints(engine, sharded_stage3.verify(engine))


def choose_group(call: Call) -> None:
    """Makes ``zero.Init`` partition over the shard group, if a degree is asked for."""
    degree = asked_degree()
    if degree == 0:
        return
    given = call.arguments
    name = "data_parallel_group"
    if given.get("sequence_data_parallel_group") is not None:
        name = "sequence_data_parallel_group"
    world = given.get(name)
    size = dist.get_world_size() if world is None else world.size()
    if Sharding.of(world) is None and degree != size:
        _check_version()
        sharding = Sharding.within(world)
        if sharding is not None:
            from deepspeed.runtime.zero import partition_parameters

            if not isinstance(partition_parameters.dist, ReplicaBroadcast):
                partition_parameters.dist = ReplicaBroadcast(partition_parameters.dist)
            call.change(**{name: sharding.shard_group})


def _check_version() -> None:
    reason = source.refusal(_FEATURE)
    if reason is not None:
        raise SmddpConfigError(
            f"{KEY} does not go with this DeepSpeed: {reason}; install the known one, or set the "
            "degree to 0"
        )


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a config with a key that does not go with a degree.

    Raises:
        SmddpConfigError: names the other key.
    """
    stage = ds_config.at(config, "zero_optimization.stage") or 0
    if stage != 3:
        raise SmddpConfigError(
            f'{KEY} needs "zero_optimization.stage": 3, and the DeepSpeed config has {stage}'
        )
    for path, idle in _EXCLUDED:
        if ds_config.at(config, path) not in idle:
            raise SmddpConfigError(
                f'{KEY} does not go with "{path}", which makes groups of its own; leave out one '
                "of the two"
            )


def suggested_degree(parameters: int, ranks: int, ranks_per_host: int) -> int:
    """A degree for a model that is small for its number of ranks; 0: shard over all ranks.

    The rule of thumb of SageMaker's sharded data parallelism: one host per 3 billion parameters.
    ``ranks`` counts the data-parallel ones.
    """
    hosts = max(1, math.ceil(parameters / PARAMETERS_PER_HOST))
    for degree in range(hosts * ranks_per_host, ranks, ranks_per_host):
        if ranks % degree == 0:
            return degree
    return 0


def _suggest(model: Any, config: Mapping[str, Any]) -> None:
    """Logs a degree on rank 0, if the job uses ZeRO-3 and no degree is set."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if (
        settings.current().source("sharded_data_parallel_degree") != settings.DEFAULT
        or ds_config.at(config, "zero_optimization.stage") != 3
        or not local.isdigit()
        or not hasattr(model, "parameters")
    ):
        return
    ranks, per_host = dist.get_world_size(), max(1, int(local))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    degree = suggested_degree(parameters, ranks, per_host)
    if degree:
        from deepspeed.utils import log_dist

        log_dist(
            f"smddp: {parameters:.3g} parameters are few for {ranks} ranks; "
            f'"sharded_data_parallel_degree": {degree} (one host per 3 billion parameters) would '
            f"keep each copy of the state, and its gathers, on {degree // per_host} host(s)",
            ranks=[0],
        )


def _attach_checkpoints(engine: Any, sharding: Sharding | None) -> None:
    # Also without a degree: a checkpoint of any number of shards resumes on any number of ranks.
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    reason = source.refusal(_FEATURE)
    if reason is None:
        ShardCheckpoints(engine, sharding)
    else:
        warn_once(
            "resharding",
            "smddp: a ZeRO-3 checkpoint resumes only on as many ranks as wrote it, as smddp's way "
            f"to divide it anew does not go with this DeepSpeed: {reason}",
        )


class ReplicaBroadcast:
    """``deepspeed.comm``, but a call on a shard group is a call on its data-parallel world.

    ``zero.Init``, ``Module.apply`` under it and ``GatheredParameters(modifier_rank=...)`` broadcast
    a parameter within the group that it is partitioned over. If that is a shard group, the other
    replicas would keep values of their own, and the source, a rank of the data-parallel world, may
    not be in the group at all.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def broadcast(self, tensor: Any, src: int, group: Any = None, **options: Any) -> Any:
        """Sends from global rank ``src`` to all data-parallel ranks."""
        sharding = Sharding.of(group)
        if sharding is not None:
            group = sharding.world
            ranks = dist.get_process_group_ranks(group)
            src = src if src in ranks else ranks[0]  # Module.apply passes 0 for the first rank
        return self._comm.broadcast(tensor, src, group=group, **options)

    def get_global_rank(self, group: Any = None, group_rank: int = 0) -> int:
        """The global rank of a data-parallel rank."""
        sharding = Sharding.of(group)
        if sharding is not None:
            return dist.get_process_group_ranks(sharding.world)[group_rank]
        return int(self._comm.get_global_rank(group, group_rank))
