"""Collective communication backend ``smddp`` for torch.distributed.

After ``import deepspeed_smddp`` (not needed if the package is installed)::

    torch.distributed.init_process_group("smddp")

DeepSpeed users write ``"comm_backend": "smddp"`` into their DeepSpeed config instead.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import smddp_autoload as _autoload
from deepspeed_smddp.version import __version__

if TYPE_CHECKING:
    from deepspeed_smddp import fsdp
    from deepspeed_smddp.config.schema import SmddpConfig
    from deepspeed_smddp.config.settings import configure
    from deepspeed_smddp.distributed import memory
    from deepspeed_smddp.distributed.backend import (
        fallback_ledger,
        peer_statistics,
        reset_statistics,
        statistics,
    )
    from deepspeed_smddp.errors import SmddpConfigError
    from deepspeed_smddp.models.delayed_init import delayed_init, materialize
    from deepspeed_smddp.models.offload import offload_activations

__all__ = [
    "SmddpConfig",
    "SmddpConfigError",
    "__version__",
    "configure",
    "delayed_init",
    "fallback_ledger",
    "fsdp",
    "materialize",
    "memory",
    "offload_activations",
    "peer_statistics",
    "reset_statistics",
    "statistics",
]

# Where the names are. Each is imported at its first use: not every process needs them.
_MODULES = {
    "fsdp": "fsdp",
    "group_states": "distributed.backend",
    "launchers": "distributed.launchers",
    "memory": "distributed.memory",
}
_NAMES = {
    "SmddpConfig": "config.schema",
    "SmddpConfigError": "errors",
    "configure": "config.settings",
    "delayed_init": "models.delayed_init",
    "fallback_ledger": "distributed.backend",
    "materialize": "models.delayed_init",
    "offload_activations": "models.offload",
    "peer_statistics": "distributed.backend",
    "reset_statistics": "distributed.backend",
    "statistics": "distributed.backend",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_autoload.register_with_torch()
