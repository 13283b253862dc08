"""``"tensor_parallel_degree"`` in the "smddp" section of a DeepSpeed config: DeepSpeed's AutoTP.

DeepSpeed divides the layers (``tensor_parallel.autotp_size``) but counts all ranks when it checks
batch sizes, so that ``train_batch_size`` would stand for a batch ``degree`` times as large as the
one that is trained on. Its groups are made beforehand and passed to it as ``mpu``: then it counts
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import tensor_parallel
from deepspeed_smddp.config import settings
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.upstream import source
from deepspeed_smddp.upstream.wrapping import Call, replaced

KEY = '"smddp.tensor_parallel_degree"'


@contextmanager
def divided(call: Call, config: Mapping[str, Any]) -> Iterator[None]:
    """Around ``initialize``: an engine on tensor-parallel groups, if a degree is asked for.

    Raises:
        SmddpConfigError: the DeepSpeed version, the config or an argument does not go with it.
    """
    degree = settings.current().section.tensor_parallel_degree
    if degree == 1 or not config:  # DeepSpeed raises the error for an unreadable one
        yield
        return
    from deepspeed.accelerator import get_accelerator

    _check(call.arguments, config, degree)
    model = call.arguments["model"]
    groups = _make_groups(degree)
    parallel = {**(config.get("tensor_parallel") or {}), "autotp_size": degree}
    call.change(config={**config, "tensor_parallel": parallel}, mpu=groups)
    device_type = get_accelerator().device_name()
    tensor_parallel.share_random_numbers(groups.get_tensor_model_parallel_group(), device_type)
    plan = _plan(model, parallel)
    args = call.arguments.get("args")
    with ExitStack() as stack:
        # DeepSpeed refuses a config in the caller's ``args`` beside one that is passed.
        for name in ("deepspeed_config", "deepscale_config"):
            if hasattr(args, name):
                stack.enter_context(replaced(args, name, None))
        yield
    seed = settings.current().section.tensor_parallel_seed
    rank = groups.get_tensor_model_parallel_rank()
    tensor_parallel.draw_apart(call.result[0].module, plan, rank, seed)


def _check(arguments: Mapping[str, Any], config: Mapping[str, Any], degree: int) -> None:
    reason = source.refusal("tensor_parallel_degree")
    if reason is not None:
        raise SmddpConfigError(
            f"{KEY} does not go with this DeepSpeed: {reason}; install the known one, or use its "
            'own section "tensor_parallel"'
        )
    tensor_parallel.check_degree(degree, dist.get_world_size())
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


def _plan(model: Any, parallel: Mapping[str, Any]) -> dict[str, str]:
    # DeepSpeed follows the model's own plan if it has one and the config gives none.
    if parallel.get("partition_config") or parallel.get("preset_model"):
        return {}
    try:
        return tensor_parallel.division(model)
    except SmddpConfigError:
        return {}
