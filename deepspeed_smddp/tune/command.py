"""``smddp tune``: makes the same choice as the start of training, and writes it into a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_smddp import comm_backend, ds_config, settings
from deepspeed_smddp.config import SECTION, parse_section
from deepspeed_smddp.errors import SmddpConfigError
from deepspeed_smddp.tune import auto_keys, startup
from deepspeed_smddp.tune.choice import Choice, choose


@dataclass(frozen=True)
class Tuned:
    """The result on one rank: the open keys, the values chosen for them, the whole config."""

    open_keys: list[str]
    choice: Choice
    config: Mapping[str, Any]
    rank: int


def run(path: Path) -> Tuned:
    """Measures the job's network for the config at ``path``; every rank of the job calls it.

    Raises:
        SmddpConfigError: the config can't be read, is not of ZeRO-3, has a wrong "smddp" section,
            or the process is not one of several ranks.
        ImportError: the extension is missing or was built for another torch.
    """
    config = ds_config.read(str(path))
    if config is None:
        raise SmddpConfigError(f"{path} is neither JSON nor hjson with an object in it")
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        raise SmddpConfigError(
            f'{path} has no "zero_optimization": {{"stage": 3}}; only ZeRO-3 has sizes to choose'
        )
    section = parse_section(config.get(SECTION, {}))
    if not comm_backend.launched():
        raise SmddpConfigError(
            "smddp tune measures the network between a job's ranks: start it with the job's "
            "launcher, for instance torchrun --nproc-per-node 8 --no-python smddp tune ..."
        )
    settings.set_file(section, zero_allgather_elements=ds_config.allgather_elements(config))
    dist.init_process_group("smddp")
    try:
        group = dist.group.WORLD
        assert group is not None
        if group.size() < 2:
            raise SmddpConfigError("a job of one rank has no network to measure")
        rank = group.rank()
        choice = choose(startup.find(group)[0], auto_keys.element_size(config))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return Tuned(auto_keys.open_keys(config), choice, auto_keys.fill(config, choice), rank)


def write(tuned: Tuned, path: Path) -> None:
    """Writes the filled config as JSON, without the comments of an hjson file.

    Raises:
        OSError: the file can't be written.
    """
    path.write_text(json.dumps(tuned.config, indent=2) + "\n", encoding="utf-8")
