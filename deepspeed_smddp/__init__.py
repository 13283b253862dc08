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
    from deepspeed_smddp import fsdp as fsdp
    from deepspeed_smddp.config.schema import SmddpConfig as SmddpConfig
    from deepspeed_smddp.config.settings import configure as configure
    from deepspeed_smddp.distributed import memory as memory
    from deepspeed_smddp.distributed.backend import fallback_ledger as fallback_ledger
    from deepspeed_smddp.distributed.backend import peer_statistics as peer_statistics
    from deepspeed_smddp.distributed.backend import reset_statistics as reset_statistics
    from deepspeed_smddp.distributed.backend import statistics as statistics
    from deepspeed_smddp.distributed.monitored_barrier import (
        monitored_barrier as monitored_barrier,
    )
    from deepspeed_smddp.errors import SmddpConfigError as SmddpConfigError
    from deepspeed_smddp.models.delayed_init import delayed_init as delayed_init
    from deepspeed_smddp.models.delayed_init import materialize as materialize
    from deepspeed_smddp.models.offload import offload_activations as offload_activations

# Where the names are. Each is imported at its first use: not every process needs them.
_MODULES = {
    "fsdp": "fsdp",
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
    "monitored_barrier": "distributed.monitored_barrier",
    "offload_activations": "models.offload",
    "peer_statistics": "distributed.backend",
    "reset_statistics": "distributed.backend",
    "statistics": "distributed.backend",
}
__all__ = ["__version__", "fsdp", "memory", *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_autoload.register_with_torch()
