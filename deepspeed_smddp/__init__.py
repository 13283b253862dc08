"""Collective communication backend ``smddp`` for torch.distributed.

After ``import deepspeed_smddp`` (not needed if the package is installed)::

    torch.distributed.init_process_group("smddp")

DeepSpeed users write ``"comm_backend": "smddp"`` into their DeepSpeed config instead.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import smddp_autoload as _autoload
from deepspeed_smddp.config import settings as _settings
from deepspeed_smddp.config.config import SmddpConfig
from deepspeed_smddp.config.settings import configure
from deepspeed_smddp.deepspeed.monitoring import follow_optimizers as _follow_steps
from deepspeed_smddp.diagnostics import counters as _ledger_reporter
from deepspeed_smddp.diagnostics import hang_reporter as _hang_reporter
from deepspeed_smddp.diagnostics import slow_watch as _slow_watch
from deepspeed_smddp.distributed import backend as _backend
from deepspeed_smddp.distributed import memory
from deepspeed_smddp.distributed.backend import (
    after_default_group,
    fallback_ledger,
    peer_statistics,
    reset_statistics,
    statistics,
)
from deepspeed_smddp.distributed.split_group import install as _install_split_group
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.models.delayed_init import delayed_init, materialize
from deepspeed_smddp.version import __version__

if TYPE_CHECKING:
    from deepspeed_smddp import fsdp
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


# Imported at first use: the import of torch's FSDP is slow, and not every process needs the others.
def __getattr__(name: str) -> Any:
    if name == "fsdp":
        return import_module("deepspeed_smddp.fsdp")
    if name == "offload_activations":
        return import_module("deepspeed_smddp.models.offload").offload_activations
    raise AttributeError(f"module 'deepspeed_smddp' has no attribute {name!r}")


def _measure_routes(group: Any, collective: str, device: str) -> Any:
    return import_module("deepspeed_smddp.tuning.routes").resolve(group, collective, device)


_backend.measure_routes = _measure_routes
for _follow in (_hang_reporter.start, _slow_watch.start, _follow_steps, _install_split_group):
    if _follow not in after_default_group:  # after importlib.reload
        after_default_group.append(_follow)
_settings.follow(_ledger_reporter.follow)
_autoload.register_once()
