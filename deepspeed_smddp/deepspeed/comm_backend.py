"""``"comm_backend": "smddp"`` in a DeepSpeed config: reads it, and makes the default group by it.

Knows nothing of ZeRO and wraps nothing; ``hooks`` calls it at the right time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.config import ds_json as ds_config
from deepspeed_smddp.config import settings
from deepspeed_smddp.config.fields import nearest, show
from deepspeed_smddp.config.parsing import SECTION, parse_section
from deepspeed_smddp.config.schema import SmddpConfig
from deepspeed_smddp.distributed import deadline, launchers
from deepspeed_smddp.errors import SmddpConfigError, warn_once

KEY = "comm_backend"
NAME = "smddp"
# Backends that DeepSpeed knows and that other packages register with torch at their import.
_ELSEWHERE = ("ccl", "hccl", "cncl", "mccl", "tccl", "bccl", "mpi")


@dataclass(frozen=True)
class Request:
    """What a DeepSpeed config says; a call that has one reads it once."""

    backend: str | None = None  # "smddp", "nccl", "cpu:gloo,cuda:smddp", ...
    section: SmddpConfig | None = None
    zero_allgather_elements: int = 0
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the whole of it

    @property
    def wants_smddp(self) -> bool:
        """Whether the backend is smddp for the device on which DeepSpeed computes."""
        return self.backend is not None and _serving(self.backend) == NAME


def parse(config: Any) -> Request:
    """Reads the backend, the section and ZeRO's AllGather bucket of a config in any form.

    Raises:
        SmddpConfigError: a misspelt backend, an unknown key or a wrong value in "smddp".
    """
    found = ds_config.read(config)
    if found is None:
        return Request()
    return Request(
        _backend(found),
        parse_section(found[SECTION]) if SECTION in found else None,
        int(ds_config.number(found, settings.ZERO_BUCKET)),
        found,
    )


def initialise(
    request: Request, *, make_group: bool = True, timeout: timedelta | None = None, **init: Any
) -> None:
    """Applies the section and makes the default group with the backend that was asked for.

    Args:
        make_group: False if the caller forbade DeepSpeed to make the default group.
        timeout: of the group's operations, if the section sets none; None: DeepSpeed's own.

    Raises:
        SmddpConfigError: the default group exists already, with another backend.
        ImportError: smddp is asked for and its extension is missing or built for another torch.
    """
    existing = group_backend() if dist.is_initialized() else None
    if existing is None:
        if request.backend is None or not make_group:
            return
        prepare(request)
        import deepspeed

        if timeout is not None:
            init["timeout"] = timeout
        deepspeed.init_distributed(dist_backend=request.backend, **init)
        return
    if request.backend is not None and not _agrees(request.backend, existing):
        raise SmddpConfigError(
            f'the DeepSpeed config has "{KEY}": {show(request.backend)}, but the default process '
            f"group was already made with {show(existing)}; make it with "
            f"init_process_group({show(request.backend)}), in Lightning "
            f"DeepSpeedStrategy(process_group_backend={show(request.backend)}), or leave making "
            "it to DeepSpeed"
        )
    if _serving(existing) == NAME:
        if request != Request():
            _apply_section(request)
            _set_timeout()
    elif request.section is not None:
        _warn_of_idle_section(existing)


def prepare(request: Request) -> None:
    """Applies the section before the group is made."""
    if request.wants_smddp:
        _apply_section(request)
    elif request.section is not None:
        _warn_of_idle_section(request.backend or "another backend")


def group_backend() -> str:
    """The default group's backend: a name, or device:name pairs if devices have different ones."""
    pairs = str(dist.get_backend_config())
    names = _names(pairs)
    return names.pop() if len(names) == 1 else pairs


def serves_default_group() -> bool:
    """Whether there is a default group, and smddp is its backend where DeepSpeed computes."""
    return dist.is_initialized() and _serving(group_backend()) == NAME


def set_launcher_variables() -> None:
    """Gives a process that mpirun or srun started the variables that torch joins by.

    Raises:
        launchers.LauncherError: the launcher does not say where rank 0 is, and there is no mpi4py,
            by which DeepSpeed asks MPI.
    """
    try:
        launchers.apply()
    except launchers.LauncherError:
        if find_spec("mpi4py") is None:
            raise


def _apply_section(request: Request) -> None:
    settings.merge_file(request.section or SmddpConfig(), request.zero_allgather_elements)


def _warn_of_idle_section(backend: str) -> None:
    warn_once(
        f"idle section, {backend}",
        f'smddp: the section "{SECTION}" of the DeepSpeed config has no effect, as the default '
        f'process group uses {backend}; put "{KEY}": "{NAME}" into the config',
    )


def _backend(config: Mapping[str, Any]) -> str | None:
    if KEY not in config:
        return None
    backend = config[KEY]
    known = [NAME, *(name for name in dist.Backend.backend_list if name not in (NAME, "undefined"))]
    if not isinstance(backend, str) or not backend:
        raise SmddpConfigError(
            f'"{KEY}" in the DeepSpeed config is {show(backend)}, but may hold the name of a '
            f"backend: {', '.join(known)}"
        )
    for name in _names(backend):
        if name not in known and name not in _ELSEWHERE:
            guess = nearest(name, [*known, *_ELSEWHERE])
            hint = f'did you mean "{guess}"? ' if guess else ""
            raise SmddpConfigError(
                f'"{KEY}" in the DeepSpeed config is {show(backend)}, which torch.distributed does '
                f"not know; {hint}known: {', '.join(known)}"
            )
    return backend.lower()


def _names(backend: str) -> set[str]:
    return {pair.rpartition(":")[2].strip().lower() for pair in backend.split(",")}


def _serving(backend: str) -> str:
    """Which of a backend's names serves the tensors of the device on which DeepSpeed computes."""
    if ":" not in backend:
        return backend.strip().lower()
    from deepspeed.accelerator import get_accelerator

    pairs = (pair.strip().lower().split(":") for pair in backend.split(","))
    return dict(pairs).get(get_accelerator().device_name(), "")


def _agrees(requested: str, existing: str) -> bool:
    alike = NAME not in _names(requested) or _serving(requested) == _serving(existing)
    return alike and _names(requested) <= _names(existing)


def _set_timeout() -> None:
    # The group was made before the section was read, with another deadline.
    current = settings.current()
    if current.source("timeout_seconds") == settings.DEFAULT:
        return
    timeout = deadline.changed(current, dist.get_rank())
    pairs = (pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    device = next(device for device, name in pairs if name == NAME)
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device(device)).set_timeout(timeout)
