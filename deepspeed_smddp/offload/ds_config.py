"""``"activation_offload"`` in the "smddp" section of a DeepSpeed config."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import settings
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.offload.model import offload_activations
from deepspeed_smddp.zero import comm_backend


def install(deepspeed: Any) -> None:
    """Wraps ``deepspeed.initialize``: the engine's module is given what the section asks for."""
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        _apply(made[0].module)
        return made

    deepspeed.initialize = initialize


def _apply(module: Any) -> None:
    if not dist.is_initialized() or comm_backend.NAME not in comm_backend.group_backend():
        return
    asked = settings.current().section.activation_offload
    if not asked.enabled:
        return
    try:
        offload_activations(module, asked.horizon, directory=asked.directory or None)
    except (ValueError, NotADirectoryError) as error:
        raise SmddpConfigError(f'"smddp.activation_offload" can\'t be applied: {error}') from None
