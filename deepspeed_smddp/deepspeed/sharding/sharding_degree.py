"""``"sharded_data_parallel_degree"``: what it changes in ``initialize`` and in ``zero.Init``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.deepspeed import comm_backend
from deepspeed_smddp.deepspeed.sharding import advice, replica_broadcast, requirements
from deepspeed_smddp.deepspeed.sharding.shard_groups import Sharding, asked_degree
from deepspeed_smddp.deepspeed.sharding.sharded_checkpoint import ShardCheckpoints
from deepspeed_smddp.upstream import versions
from deepspeed_smddp.upstream.wrapping import Call


@contextmanager
def around_initialize(call: Call) -> Iterator[None]:
    """Builds the engine on shard groups, if a degree is asked for; suggests one if not.

    Raises:
        SmddpConfigError: the DeepSpeed version or the config does not go with a degree, or the
            degree does not divide the data-parallel ranks.
    """
    config = ds_config.read(ds_config.of_initialize(call.arguments)) or {}
    degree = asked_degree()
    if degree == 0:
        advice.suggest(call.arguments.get("model"), config)
    if degree in (0, _job_size()):
        yield
        engine = call.result[0]
        if degree:
            Sharding.within(engine.seq_data_parallel_group)  # raises if it has fewer ranks
        _attach_checkpoints(engine, None)
        return
    requirements.check_deepspeed()
    requirements.check_config(config)
    # It derives from DeepSpeed's stage 3, so its import imports DeepSpeed.
    from deepspeed_smddp.deepspeed.sharding import sharded_stage3

    with sharded_stage3.in_place_of_stage3():
        yield
    engine = call.result[0]
    _attach_checkpoints(engine, sharded_stage3.verify(engine))


@contextmanager
def around_zero_init(call: Call) -> Iterator[None]:
    """Partitions over the shard group, if a degree is asked for."""
    _choose_group(call)
    yield


def _choose_group(call: Call) -> None:
    given = call.arguments
    if not given.get("enabled", True) or asked_degree() == 0:
        return
    name = "data_parallel_group"
    if given.get("sequence_data_parallel_group") is not None:
        name = "sequence_data_parallel_group"
    world = given.get(name)
    if Sharding.of(world) is not None:
        return
    if asked_degree() != (_job_size() if world is None else world.size()):
        requirements.check_deepspeed()
        sharding = Sharding.within(world)
        if sharding is not None:
            replica_broadcast.install()
            call.change(**{name: sharding.shard_group})


def _attach_checkpoints(engine: Any, sharding: Sharding | None) -> None:
    # Also without a degree: a checkpoint of any number of shards resumes on any number of ranks.
    import deepspeed

    if not comm_backend.serves_default_group():
        return
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    unsupported = versions.refusal("sharded_data_parallel_degree", deepspeed)
    if unsupported is None:
        ShardCheckpoints(engine, sharding)
    else:
        settings.warn_once(
            "resharding",
            "smddp: a ZeRO-3 checkpoint resumes only on as many ranks as wrote it, as smddp's way "
            f"to divide it anew {unsupported}",
        )


def _job_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
