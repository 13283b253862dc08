"""What happens to ``"auto"`` when training starts: measure, or recall, choose, say so once."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_smddp import backend, settings
from deepspeed_smddp.errors import logger
from deepspeed_smddp.tune import auto_keys, cache
from deepspeed_smddp.tune.choice import SMDDP_KEYS, Choice, NetworkModel, choose
from deepspeed_smddp.tune.measure import measure, probe

# A remembered curve whose rate at one size is off by more than this is measured again.
_STALE = 2.0
_BLOB = 4096  # bytes

_choice: Choice | None = None
_curves: WeakKeyDictionary[dist.ProcessGroup, NetworkModel] = WeakKeyDictionary()
_said: set[str] = set()


def current() -> Choice | None:
    """What was chosen in this process, if anything was."""
    return _choice


def tune(config: Mapping[str, Any], group: dist.ProcessGroup) -> Choice | None:
    """Fills what a ZeRO-3 config leaves open, for ``group``; collective, with equal results.

    None, and nothing is measured, where the config leaves nothing open, is not ZeRO-3's, or the
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
    curve, source = find(group)
    if not counted:
        backend.reset_statistics()  # what follows is training
    _choice = choose(curve, auto_keys.element_size(config))
    settings.set_measured({key: getattr(_choice, key) for key in SMDDP_KEYS})
    _say(_choice, open_keys, f"{source} in {time.perf_counter() - began:.2f} s")
    return _choice


def find(group: dist.ProcessGroup) -> tuple[NetworkModel, str]:
    """The group's curve, and whether it was ``measured`` or ``recalled``; collective."""
    from deepspeed_smddp import __version__

    if group in _curves:
        return _curves[group], "recalled"

    name = cache.topology(__version__, _hosts(group))
    curve = _shared(cache.load(name) if group.rank() == 0 else None, group)
    if curve is not None and _fits(curve, group):
        _curves[group] = curve
        return curve, "recalled"
    _curves[group] = curve = measure(group)
    if group.rank() == 0:
        cache.store(name, curve)
    return curve, "measured"


def _fits(curve: NetworkModel, group: dist.ProcessGroup) -> bool:
    middle = curve.allgather[len(curve.allgather) // 2]
    ratio = probe(group, middle.size) / middle.seconds
    return 1 / _STALE < ratio < _STALE


def _hosts(group: dist.ProcessGroup) -> list[str]:
    host = os.environ.get("SMDDP_HOST_ID") or socket.gethostname()
    own = torch.frombuffer(bytearray(hashlib.sha256(host.encode()).digest()), dtype=torch.uint8)
    everyone = torch.empty(own.numel() * group.size(), dtype=torch.uint8)
    group.allgather_into_tensor_coalesced([everyone], [own]).wait()
    return [row.numpy().tobytes().hex() for row in everyone.chunk(group.size())]


def _shared(curve: NetworkModel | None, group: dist.ProcessGroup) -> NetworkModel | None:
    """The curve of the group's first rank."""
    text = json.dumps(None if curve is None else asdict(curve)).encode()
    if len(text) > _BLOB:
        text = b"null"
    own = torch.frombuffer(bytearray(text.ljust(_BLOB)), dtype=torch.uint8)
    everyone = torch.empty(_BLOB * group.size(), dtype=torch.uint8)
    group.allgather_into_tensor_coalesced([everyone], [own]).wait()
    found = json.loads(everyone[:_BLOB].numpy().tobytes())
    return None if found is None else cache.from_json(found)


def _say(choice: Choice, open_keys: list[str], how: str) -> None:
    text = "; ".join(f"{key} {getattr(choice, key)} ({choice.why[key]})" for key in open_keys)
    if text in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add(text)
    # Not below WARNING: that is what a program that set up no logging shows.
    logger.warning("smddp: chosen for this network, %s: %s", how, text)
