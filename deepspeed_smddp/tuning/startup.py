"""``"auto"`` when training starts: measures the network or loads it, chooses, logs it once."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from deepspeed_smddp.config import settings
from deepspeed_smddp.distributed import backend, launchers
from deepspeed_smddp.errors import logger
from deepspeed_smddp.tuning import auto_keys, cache
from deepspeed_smddp.tuning.choice import SMDDP_KEYS, Choice, NetworkModel, choose
from deepspeed_smddp.tuning.measure import CPU, is_close, measure, probe
from deepspeed_smddp.version import __version__

_BLOB = 4096  # bytes
_Kind = TypeVar("_Kind")

_choice: Choice | None = None
# By group and type of device.
_networks: WeakKeyDictionary[dist.ProcessGroup, dict[str, NetworkModel]] = WeakKeyDictionary()
_said: set[str] = set()


def current() -> Choice | None:
    """The choice of this process, or None."""
    return _choice


def tune(
    config: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device = CPU
) -> Choice | None:
    """Chooses what a ZeRO-3 config leaves open, for ``group``; collective, with equal results.

    ``device`` is where this rank's parameters are.

    Measures nothing and returns None if the config leaves nothing open, is not of ZeRO-3, or the
    group has one rank.
    """
    global _choice
    open_keys = auto_keys.open_keys(config)
    section = settings.current().section
    open_keys = [key for key in open_keys if getattr(section, key, "auto") == "auto"]
    if not open_keys or group.size() < 2:
        return None
    began = time.perf_counter()
    counted = backend.statistics()
    network, source = find(group, device)
    if not counted:
        backend.reset_statistics()  # the counters are to show training alone
    _choice = choose(network, auto_keys.element_size(config), device.type == "cuda")
    settings.set_measured({key: getattr(_choice, key) for key in SMDDP_KEYS})
    _say(_choice, open_keys, f"{source} in {time.perf_counter() - began:.2f} s")
    return _choice


def find(group: dist.ProcessGroup, device: torch.device = CPU) -> tuple[NetworkModel, str]:
    """The group's network model, and whether it was ``measured`` or ``recalled``; collective."""
    known = _networks.setdefault(group, {})
    if device.type in known:
        return known[device.type], "recalled"
    name = name_of(group, device)
    network = shared(cache.load(name, cache.NETWORK), cache.NETWORK, group)
    if network is not None:
        middle = network.allgather[len(network.allgather) // 2]
        if is_close([probe(group, middle.size, device)], [middle.seconds]):
            known[device.type] = network
            return network, "recalled"
    known[device.type] = network = measure(group, device=device)
    if group.rank() == 0:
        cache.store(name, network, cache.NETWORK)
    return network, "measured"


def name_of(group: Any, device: torch.device, *what: str) -> str:
    """The name in the cache of what is measured of a group for tensors of a device; collective."""
    gpu = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    return cache.topology(" ".join([__version__, *what, *gpu]), hosts(group))


def hosts(group: Any) -> list[str]:
    """The identity of each rank's host, by rank; collective."""
    name = launchers.host_name()
    own = torch.frombuffer(bytearray(hashlib.sha256(name.encode()).digest()), dtype=torch.uint8)
    gathered = torch.empty(own.numel() * group.size(), dtype=torch.uint8)
    group._allgather_base(gathered, own).wait()
    return [row.numpy().tobytes().hex() for row in gathered.chunk(group.size())]


def shared(value: _Kind | None, kind: TypeAdapter[_Kind], group: Any) -> _Kind | None:
    """The value of the first rank, on all ranks; None if there is none or it is too long.

    Collective.
    """
    text = b"" if value is None else kind.dump_json(value)
    own = torch.zeros(_BLOB, dtype=torch.uint8)
    if 0 < len(text) <= _BLOB:
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = torch.empty(_BLOB * group.size(), dtype=torch.uint8)
    group._allgather_base(gathered, own).wait()
    found = gathered[:_BLOB].numpy().tobytes().rstrip(b"\0")
    return kind.validate_json(found, strict=True) if found else None


def _say(choice: Choice, open_keys: list[str], how: str) -> None:
    text = "; ".join(f"{key} {getattr(choice, key)} ({choice.why[key]})" for key in open_keys)
    if text in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add(text)
    # WARNING is the lowest level that a program without logging set-up shows.
    logger.warning("smddp: chosen for this network, %s: %s", how, text)
