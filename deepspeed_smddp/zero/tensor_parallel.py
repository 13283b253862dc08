"""``"tensor_parallel_degree"`` in the "smddp" section of a DeepSpeed config: DeepSpeed's AutoTP.

DeepSpeed divides the layers (``tensor_parallel.autotp_size``) but counts all ranks when it checks
batch sizes, so that ``train_batch_size`` would stand for a batch ``degree`` times as large as the
one that is trained on. Its groups are made beforehand and handed to it as ``mpu``: then it counts
data-parallel ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import settings
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.zero import comm_backend, ds_config

KEY = '"smddp.tensor_parallel_degree"'
KNOWN_DEEPSPEED = ("0.19.8",)  # versions whose groups and AutoTP were read for this


def install(deepspeed: Any) -> None:
    """Wraps ``deepspeed.initialize``; nothing changes where no degree is asked."""
    deepspeed.initialize = _around_initialize(deepspeed.initialize)


def _around_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        degree = asked_degree()
        if degree == 1:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        config = ds_config.of_initialize(bound.arguments)
        read = ds_config.read(config)
        if read is None:
            return original(*args, **kwargs)  # raises, with its own message
        from deepspeed.accelerator import get_accelerator

        from deepspeed_smddp import tensor_parallel

        _check(bound.arguments, read, degree)
        model = bound.arguments["model"]
        groups = _make_groups(degree)
        parallel = {**(read.get("tensor_parallel") or {}), "autotp_size": degree}
        _replace_config(bound.arguments, {**read, "tensor_parallel": parallel})
        bound.arguments["mpu"] = groups
        device_type = get_accelerator().device_name()
        tensor_parallel.share_random_numbers(groups.get_tensor_model_parallel_group(), device_type)
        plan = _plan(model, parallel)
        made = original(*bound.args, **bound.kwargs)
        seed = settings.current().section.tensor_parallel_seed
        rank = groups.get_tensor_model_parallel_rank()
        tensor_parallel.draw_apart(made[0].module, plan, rank, seed)
        return made

    return initialize


def asked_degree() -> int:
    """The degree that applies now: 1 without one, and where the default group is not smddp's."""
    if not dist.is_initialized() or comm_backend.NAME not in comm_backend.group_backend():
        return 1
    return settings.current().section.tensor_parallel_degree


def _check(arguments: Mapping[str, Any], config: Mapping[str, Any], degree: int) -> None:
    import deepspeed

    from deepspeed_smddp.tensor_parallel import check_degree

    if deepspeed.__version__ not in KNOWN_DEEPSPEED:
        raise SmddpConfigError(
            f"{KEY} works with DeepSpeed {', '.join(KNOWN_DEEPSPEED)}, and this is "
            f"{deepspeed.__version__}; install a known one, or use its own section "
            '"tensor_parallel"'
        )
    check_degree(degree, dist.get_world_size())
    for name in ("mpu", "mesh_param"):
        if arguments.get(name) is not None:
            raise SmddpConfigError(
                f"{KEY} is {degree}, but deepspeed.initialize was given {name}, which makes groups "
                "of its own; leave out one of the two"
            )
    given = (config.get("tensor_parallel") or {}).get("autotp_size") or degree
    if given != degree:
        raise SmddpConfigError(
            f'{KEY} is {degree}, but "tensor_parallel.autotp_size" is {given}; leave out the latter'
        )
    model = arguments.get("model")
    if any(hasattr(p, "ds_id") for p in getattr(model, "parameters", list)()):
        raise SmddpConfigError(
            f"{KEY} is {degree}, but the model was built under zero.Init, which divides parameters "
            "over all ranks; build it outside"
        )


def _make_groups(degree: int) -> Any:
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    made = groups.get_tensor_model_parallel_world_size()
    if made != degree:
        raise SmddpConfigError(
            f"{KEY} is {degree}, but tensor-parallel groups of {made} ranks were made before in "
            "this process, and DeepSpeed keeps one kind"
        )
    return groups


def _replace_config(arguments: dict[str, Any], config: Mapping[str, Any]) -> None:
    arguments.pop("config_params", None)
    args = arguments.get("args")
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    arguments["config"] = dict(config)


def _plan(model: Any, parallel: Mapping[str, Any]) -> dict[str, str]:
    # DeepSpeed follows the model's own plan where it has one and the config gives none.
    from deepspeed_smddp.tensor_parallel import division

    if parallel.get("partition_config") or parallel.get("preset_model"):
        return {}
    try:
        return division(model)
    except SmddpConfigError:
        return {}
