"""Sharding by degree: the model's state sharded within p ranks and replicated beyond them.

MiCS (Zhang et al., VLDB 2022): of n data-parallel ranks each p neighbours form a *shard group* that
holds one copy of parameters, gradients and optimizer states; the ranks with the same place in every
shard group form a *replica group*. ZeRO-3 gathers parameters and reduce-scatters gradients within
the shard group only; once per accumulation boundary the replica groups average what they hold.

DeepSpeed 0.19.8 keeps a process group per parameter, which this rests on: ``zero.Init`` gets the
shard group (here), stage 3 as well (``sharded_stage3``), broadcasts of initial values reach all
replicas (``replica_broadcast``) and a checkpoint is that of one shard group
(``sharded_checkpoint``). All else, batch sizes and learning rates included, sees all n ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import settings
from deepspeed_smddp.config import SECTION
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.zero import comm_backend, ds_config

KEY = f'"{SECTION}.sharded_data_parallel_degree"'
KNOWN_DEEPSPEED = ("0.19.8",)  # versions whose stage 3 was read for this
PARAMETERS_PER_HOST = 3_000_000_000

# Features of stage 3 that bring groups of their own; path in the config, and its idle values.
_EXCLUDED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("zero_optimization.zero_hpz_partition_size", (None, 1)),
    ("zero_optimization.zero_quantized_gradients", (None, False)),
    ("zero_optimization.zenflow", (None,)),
    ("zero_optimization.offload_optimizer.super_offload", (None, False)),
    ("expert_parallel.enabled", (None, False)),
    ("compile.deepcompile", (None, False)),
)


@dataclass(frozen=True, eq=False)
class Sharding:
    """One rank's groups. ``world`` are the n data-parallel ranks that are divided."""

    degree: int
    world: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup

    @property
    def replicas(self) -> int:
        """Copies of the model's state: n / p."""
        return self.world.size() // self.degree

    @property
    def replica(self) -> int:
        """Which of the copies this rank holds a shard of."""
        return self.world.rank() // self.degree

    @classmethod
    def within(cls, world: Any = None) -> Sharding | None:
        """The division of ``world`` (None: all ranks) that the settings ask for.

        Every rank of the job must call it, with the world that it belongs to. None where the state
        is sharded over all ranks: no degree, one that equals the world's size, or no smddp.

        Raises:
            SmddpConfigError: the degree does not divide the world's size.
        """
        degree = asked_degree()
        if degree == 0:
            return None
        return _groups().divide(dist.group.WORLD if world is None else world, degree)

    @classmethod
    def of(cls, shard_group: Any) -> Sharding | None:
        """The division that a process group is a shard group of."""
        return _groups().by_shard_group.get(shard_group)


class _Groups:
    """The groups made under one default group; all ranks make them once, in one order."""

    def __init__(self) -> None:
        self.default = dist.group.WORLD
        self.by_shard_group: dict[Any, Sharding] = {}
        self._by_ranks: dict[tuple[int, tuple[int, ...]], Sharding] = {}

    def divide(self, world: Any, degree: int) -> Sharding | None:
        size = world.size()
        if degree == size:
            return None
        if size % degree:
            divisors = [str(p) for p in range(1, size + 1) if size % p == 0]
            raise SmddpConfigError(
                f"{KEY} is {degree}, but may hold a divisor of the {size} data-parallel ranks: "
                f"{', '.join(divisors)} (or 0 for all of them)"
            )
        ranks = tuple(dist.get_process_group_ranks(world))
        if (degree, ranks) not in self._by_ranks:
            self._make(world, ranks, degree)
        return self._by_ranks[degree, ranks]

    def _make(self, world: Any, ranks: tuple[int, ...], degree: int) -> None:
        worlds = [ranks] if len(ranks) == dist.get_world_size() else _everyones(ranks)
        shards = [list(w[i : i + degree]) for w in worlds for i in range(0, len(w), degree)]
        replicas = [list(w[i::degree]) for w in worlds for i in range(degree)]
        make: Callable[..., Any] = dist.new_subgroups_by_enumeration
        shard_group, _ = make(shards)
        replica_group, _ = make(replicas)
        sharding = Sharding(degree, world, shard_group, replica_group)
        self._by_ranks[degree, ranks] = self.by_shard_group[shard_group] = sharding


_made: _Groups | None = None


def _groups() -> _Groups:
    global _made
    if _made is None or _made.default is not dist.group.WORLD:  # a new job in the same process
        _made = _Groups()
    return _made


def _everyones(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    # With tensor or pipeline parallelism there are several data-parallel worlds, and each rank
    # knows its own; all ranks make all groups, in one order.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ranks)
    return sorted(set(gathered))


def asked_degree() -> int:
    """The degree that applies now: 0 without one, and where the default group is not smddp's."""
    if not _on_smddp():
        return 0
    return settings.current().section.sharded_data_parallel_degree


def suggested_degree(parameters: int, ranks: int, ranks_per_host: int) -> int:
    """A degree for a model that is small for the world; 0: shard over all ranks.

    The rule of thumb of SageMaker's sharded data parallelism: one host per 3 billion parameters.

    Args:
        parameters: of the model, in elements.
        ranks: data-parallel ranks.
        ranks_per_host: of them, on each host.
    """
    hosts = max(1, math.ceil(parameters / PARAMETERS_PER_HOST))
    for degree in range(hosts * ranks_per_host, ranks, ranks_per_host):
        if ranks % degree == 0:
            return degree
    return 0


def install(deepspeed: Any) -> None:
    """Wraps ``initialize`` and ``zero.Init.__init__``; nothing changes where no degree is asked."""
    deepspeed.initialize = _around_initialize(deepspeed.initialize)
    deepspeed.zero.Init.__init__ = _around_zero_init(deepspeed.zero.Init.__init__)


def _around_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    # Builds the engine on shard groups where a degree is asked.
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        config = ds_config.read(ds_config.of_initialize(arguments)) or {}
        degree = asked_degree()
        if degree == 0:
            _suggest(arguments.get("model"), config)
        if degree in (0, _job_size()):
            made = original(*args, **kwargs)
            if degree:
                Sharding.within(made[0].seq_data_parallel_group)  # raises where it has fewer ranks
            _attach_checkpoints(made[0], None)
            return made
        check_deepspeed()
        check_config(config)
        from deepspeed_smddp.zero import sharded_stage3

        with sharded_stage3.in_place_of_stage3():
            made = original(*args, **kwargs)
        _attach_checkpoints(made[0], sharded_stage3.verify(made[0]))
        return made

    return initialize


def _around_zero_init(original: Callable[..., None]) -> Callable[..., None]:
    # Partitions over the shard group where a degree is asked.
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if not given.get("enabled", True) or asked_degree() == 0:
            return original(*args, **kwargs)
        name = "data_parallel_group"
        if given.get("sequence_data_parallel_group") is not None:
            name = "sequence_data_parallel_group"
        world = given.get(name)
        if Sharding.of(world) is not None:
            return original(*args, **kwargs)
        if asked_degree() != (_job_size() if world is None else world.size()):
            check_deepspeed()
            sharding = Sharding.within(world)
            if sharding is not None:
                from deepspeed_smddp.zero import replica_broadcast

                replica_broadcast.install()
                given[name] = sharding.shard_group
        return original(*bound.args, **bound.kwargs)

    return init


def check_deepspeed() -> None:
    """Refuses a DeepSpeed whose inside is not known, or is not as it was.

    Raises:
        SmddpConfigError: naming the version, or what is missing.
    """
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters, stage3

    if deepspeed.__version__ not in KNOWN_DEEPSPEED:
        raise SmddpConfigError(
            f"{KEY} works with DeepSpeed {', '.join(KNOWN_DEEPSPEED)}, and this is "
            f"{deepspeed.__version__}; install a known one, or set the degree to 0"
        )
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    wanted = (
        (partition_parameters, ("dist", "GatheredParameters", "Init")),
        (optimizer, ("step", "_finalize_offload_gradient_accumulation", "_get_norm_groups")),
        (optimizer, ("get_fp32_grad_for_param", "_get_param_partition_group")),
        (
            DeepSpeedEngine,
            ("_load_zero_checkpoint", "_common_checkpoint_state", "_load_checkpoint"),
        ),
        (DeepSpeedEngine, ("_get_all_ckpt_names", "load_module_state_dict")),
    )
    for owner, names in wanted:
        for name in names:
            if not hasattr(owner, name):
                raise SmddpConfigError(
                    f"{KEY} needs {owner.__name__}.{name}, which this copy of DeepSpeed "
                    f"{deepspeed.__version__} lacks; install the released one, or set the degree "
                    "to 0"
                )


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses what does not go with a degree.

    Raises:
        SmddpConfigError: naming the other key.
    """
    stage = _at(config, "zero_optimization.stage") or 0
    if stage != 3:
        raise SmddpConfigError(
            f'{KEY} needs "zero_optimization.stage": 3, and the DeepSpeed config has {stage}'
        )
    for path, idle in _EXCLUDED:
        if _at(config, path) not in idle:
            raise SmddpConfigError(
                f'{KEY} does not go with "{path}", which makes groups of its own; leave out one '
                "of the two"
            )


def _attach_checkpoints(engine: Any, sharding: Sharding | None) -> None:
    # Also without a degree: a checkpoint of any number of shards resumes on any number of ranks.
    import deepspeed

    if not _on_smddp() or deepspeed.__version__ not in KNOWN_DEEPSPEED:
        return
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        from deepspeed_smddp.zero.sharded_checkpoint import ShardCheckpoints

        ShardCheckpoints(engine, sharding)


def _on_smddp() -> bool:
    return dist.is_initialized() and comm_backend.NAME in comm_backend.group_backend()


def _job_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _suggest(model: Any, config: Mapping[str, Any]) -> None:
    # Only to those who chose smddp and ZeRO-3 and left the degree open.
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if (
        not _on_smddp()
        or settings.current().source("sharded_data_parallel_degree") != settings.DEFAULT
        or _at(config, "zero_optimization.stage") != 3
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
            f"keep each copy of the state on {degree // max(1, int(local))} host(s), and gathers "
            "off the others",
            ranks=[0],
        )


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for as long as it lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
