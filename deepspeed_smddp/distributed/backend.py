"""The torch.distributed backend: makes groups, and hands foreign operations to Gloo or NCCL."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_smddp.config import settings
from deepspeed_smddp.distributed import deadline, extension
from deepspeed_smddp.errors import logger, warn_once

FALLBACK_PREFIX = "fallback:"
INEFFECTIVE = (
    "set for torch's NCCL groups; no effect on what smddp carries, only on what it leaves to NCCL"
)
_BY_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # set where the user has not

_default_rank: int | None = None
_has_made_group = False


def create(
    options: Any,
    backend_options: Any,
    measure_routes: Callable[[Any, str, str], list[tuple[int, str]] | None],
) -> extension.core.ProcessGroupSMDDP:
    """Makes one group, for ``init_process_group("smddp")`` or ``new_group``.

    Args:
        options: torch's ``DistributedBackendOptions`` (store, group_rank, group_size, timeout,
            group_id).
        backend_options: the caller's ``pg_options``. smddp has none of its own; NCCL's options
            reach the NCCL group that carries out the operations that smddp does not own.
        measure_routes: called with the group, a collective and "cpu" or "cuda" when the first such
            operation has the route "auto": a call of all ranks. Returns steps of (bytes at most or
            0, route), or None if not now.

    Raises:
        ImportError: the extension is missing or was built for another torch.
        SmddpConfigError: an environment variable holds a value that is not allowed.
        RuntimeError: a rank could not make its part, or did not come in time; says which and why.
    """
    global _default_rank, _has_made_group
    is_default = not dist.is_initialized()
    if is_default:
        _default_rank = options.group_rank
    settings.follow(_configure_core)
    if names := ineffective_variables():
        warn_once("TORCH_NCCL", f"smddp: {', '.join(names)}: {INEFFECTIVE}")
    timeout = deadline.of_group(settings.apply(), options.timeout, options.group_rank)
    group = extension.core.ProcessGroupSMDDP(
        options.store,
        options.group_rank,
        options.group_size,
        timeout,
        options.group_id,
        fallback_factory(options, timeout, backend_options),
        measure_routes,
        list(options.global_ranks_in_group),
        is_default or options.group_size == dist.get_world_size(),
    )
    _has_made_group = True
    return group


def ineffective_variables() -> list[str]:
    """The settings of torch's NCCL groups in the environment that say nothing to smddp."""
    return sorted(
        name
        for name, value in os.environ.items()
        if name.startswith("TORCH_NCCL_") and (name, value) != _BY_TORCHRUN
    )


def _configure_core(current: settings.Settings) -> None:
    extension.core.configure(**current.core_options())


def serves(group: Any, device: torch.device) -> bool:
    """Whether smddp serves a group's tensors of a type of device."""
    if not isinstance(group, dist.ProcessGroup):
        return False
    try:
        return group._get_backend(device).name() == "smddp"
    except RuntimeError:  # the group has no backend for it
        return False


def has_made_group() -> bool:
    """Whether this process has made a group of smddp."""
    return _has_made_group


def default_rank() -> int | None:
    """This process's rank in the latest default group of smddp; None if there was none."""
    return _default_rank


def reset_names_after_failed_world() -> None:
    """Lets this process name its next default group as the other ranks name theirs.

    torch numbers groups in the order in which a process makes them, looks for its peers under that
    number, and begins anew in ``destroy_process_group``. If ``init_process_group`` raises there is
    nothing to destroy and the number stays, so that no later group of this process would meet its
    peers. Does nothing where a default group exists: what follows it is counted on all its ranks.
    """
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    if not dist.is_initialized() and isinstance(getattr(world, "group_count", None), int):
        world.group_count = 0


def fallback_factory(
    options: Any, timeout: timedelta, backend_options: Any = None
) -> Callable[[str, str, str], Any]:
    """A function that makes the fallback backend for a device type.

    Its second argument names this making of the group and is the same on all its ranks: a store
    that outlives them (torchrun's, after a restart) still holds the addresses of earlier ranks.
    The third is the address of this host on the network that smddp has chosen.

    The group calls it at its first operation that smddp does not own. The constructors of Gloo and
    NCCL do not wait for the other ranks, so that this operation may be a send between two of many
    ranks: Gloo connects a pair at its first message (lazy devices), NCCL makes its communicators at
    the first operation.
    """
    nccl_type = getattr(dist, "ProcessGroupNCCL", None)
    is_nccl_options = nccl_type is not None and isinstance(backend_options, nccl_type.Options)
    if backend_options is not None and not is_nccl_options:
        logger.warning(
            "smddp: pg_options of type %s have no effect on an smddp group",
            type(backend_options).__name__,
        )

    def make(device_type: str, rendezvous: str, address: str) -> Any:
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"smddp-fallback/{rendezvous}/{device_type}", options.store
        )
        if device_type == "cuda":
            return _nccl(store, options, timeout, backend_options if is_nccl_options else None)
        return _gloo(store, options, timeout, address)

    return make


def _gloo(store: Any, options: Any, timeout: timedelta, address: str) -> Any:
    """``GLOO_SOCKET_IFNAME`` first; Gloo itself would take the address of this host's name."""
    gloo = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo_options = gloo._Options()  # type: ignore[attr-defined]
    gloo_options._devices = [
        gloo.create_device(interface=name, lazy_init=True) for name in interfaces
    ]
    if not interfaces and address:
        gloo_options._devices = [gloo.create_device(hostname=address, lazy_init=True)]
    elif not interfaces:
        gloo_options._devices = [gloo.create_default_device(lazy_init=True)]
    gloo_options._threads = 2 * len(gloo_options._devices)
    gloo_options._timeout = timeout
    return gloo(store, options.group_rank, options.group_size, gloo_options)


def _nccl(store: Any, options: Any, timeout: timedelta, given: Any) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError(
            "smddp hands this operation on CUDA tensors to NCCL, but this torch has no NCCL"
        )
    nccl_options = given if given is not None else dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    nccl_options.group_name = f"{options.group_id}-smddp-fallback"
    return dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl_options)


def statistics() -> list[extension.core.StatisticsRow]:
    """Calls, bytes and seconds of every collective, by the path it took, since the last reset.

    ``seconds`` is the time from the call to the completion, or until a caller that waited for it
    continued; ``wait_seconds`` is the part of it that callers spent in ``wait()``. The list is
    empty if the extension was not loaded, because no operation ran then.
    """
    return extension.core.statistics() if extension.is_loaded() else []


def reset_statistics() -> None:
    """Sets the counters of :func:`statistics` to zero."""
    extension.core.reset_statistics()


def fallback_ledger() -> list[extension.core.StatisticsRow]:
    """The rows of :func:`statistics` for operations that Gloo or NCCL carried out."""
    return [row for row in statistics() if row["path"].startswith(FALLBACK_PREFIX)]


def states(with_connections: bool = False) -> list[dict[str, Any]]:
    """The state of each group, with the job's numbers of its ranks; none before the first group."""
    if not extension.is_loaded():
        return []
    return extension.core.group_states(with_connections)


def peer_statistics() -> dict[str, list[dict[str, Any]]]:
    """For each other rank how long this one waited for it, for each other host the rate of bytes.

    Returns:
        ``ranks``: rows with ``rank`` (global), ``host``, ``late_seconds`` and ``late``: time that
        callers of this rank spent in ``wait()`` after half of the ranks of a group had started a
        collective and before that rank had, and in how many collectives. ``hosts``: rows with
        ``host``, ``bytes``, ``seconds`` and ``bytes_per_second`` of the large flows from there to
        this rank, one flow by itself. All since the groups were made; ranks and hosts without
        anything to say of are left out.
    """
    ranks: dict[int, dict[str, Any]] = {}
    flows: dict[str, dict[str, Any]] = defaultdict(lambda: {"bytes": 0, "seconds": 0.0})
    for group in states():
        hosts = dict(zip(group["members"], group["hosts"], strict=False))
        for peer in group["peers"]:
            rank, host = peer["rank"], hosts[peer["rank"]]
            row = ranks.setdefault(rank, {"rank": rank, "host": host, "late_seconds": 0, "late": 0})
            row["late_seconds"] += peer["late_seconds"]
            row["late"] += peer["late"]
            if peer["flow_bytes"] > 0:
                flows[host]["bytes"] += peer["flow_bytes"]
                flows[host]["seconds"] += peer["flow_seconds"]
    return {
        "ranks": [row for _, row in sorted(ranks.items()) if row["late"]],
        "hosts": [
            {"host": host, **flow, "bytes_per_second": flow["bytes"] / flow["seconds"]}
            for host, flow in sorted(flows.items())
        ],
    }
