"""Whether functions of DeepSpeed and torch are the ones that were read for a feature.

A replacement rests on what the functions around it do. This file lists those of each feature;
``known_sources.json`` has the digests of their sources in the releases that were read
(``tools/record_sources.py`` writes it). If the digests are not those of one of these releases, the
library's own path stays, and one warning says why.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_smddp.config import settings
from deepspeed_smddp.upstream import versions

SWITCH = "SMDDP_ZERO_PATHS"
_SWITCHED = ("gather", "reduce", "overlap")  # features that the switch turns off

_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_REGISTRY = "deepspeed.runtime.zero.partitioned_param_coordinator:InflightParamRegistry"
_COORDINATOR = (
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
)
_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_COLLECTIVES = "deepspeed.runtime.comm.coalesced_collectives"

_FSDP = "torch.distributed.fsdp._fully_shard"

# Feature -> what it rests on, as module:name. A name may be missing in some versions.
PLACES: dict[str, tuple[str, ...]] = {
    "gather": (
        f"{_PARAMETERS}:AllGatherCoalescedHandle",
        f"{_PARAMETERS}:Init._convert_to_deepspeed_param",
        f"{_PARAMETERS}:Init._all_gather",
        f"{_PARAMETERS}:Init._allgather_params_coalesced",
        _REGISTRY,
        f"{_COORDINATOR}.fetch_sub_module",
        f"{_COORDINATOR}._fetch_sub_module_impl",
        f"{_COORDINATOR}.__all_gather_params_",
    ),
    "reduce": (
        f"{_COLLECTIVES}:reduce_scatter_coalesced",
        f"{_STAGE3}.__reduce_and_partition_ipg_grads",
        f"{_STAGE3}.__avg_scatter_grads",
        f"{_STAGE3}.partition_grads",
    ),
    "overlap": (
        f"{_COLLECTIVES}:reduce_scatter_coalesced",
        "deepspeed.runtime.zero.stage3:IPGBucketZ3",
        f"{_STAGE3}.__add_grad_to_ipg_bucket",
        f"{_STAGE3}.reduce_independent_p_g_buckets_and_remove_grads",
        f"{_STAGE3}.__reduce_and_partition_ipg_grads",
        f"{_STAGE3}.__avg_scatter_grads",
        f"{_STAGE3}.partition_grads",
        f"{_STAGE3}.independent_gradient_partition_epilogue",
        f"{_STAGE3}._pre_step",
    ),
    "bucket sizes": ("deepspeed.runtime.zero.config:get_zero_config",),
    "comms log": (
        "deepspeed.utils.comms_logging:calc_bw_log",
        "deepspeed.utils.comms_logging:CommsLogger.append",
        "deepspeed.comm.comm:timed_op",
        "deepspeed.comm.utils:get_msg_size_from_args",
    ),
    "monitor": (
        "deepspeed.monitor.monitor:MonitorMaster",
        f"{_ENGINE}._take_model_step",
        f"{_ENGINE}.steps_per_print",
    ),
    "fsdp backward": (
        f"{_FSDP}._fsdp_collectives:foreach_reduce",
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward",
        f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback",
    ),
}
_CONSEQUENCE = {
    "gather": "ZeRO-3 gathers parameters the way DeepSpeed does, with copies",
    "reduce": "ZeRO-3 reduces gradients the way DeepSpeed does, with copies",
    "overlap": "ZeRO-3 waits for each bucket of gradients on the CPU, as DeepSpeed does",
    "bucket sizes": 'sizes that "zero_optimization" leaves open stay at DeepSpeed\'s defaults',
    "comms log": "with comms_logger, ZeRO-3 gathers and reduces the way DeepSpeed does",
    "monitor": "DeepSpeed's monitor gets no counters of smddp",
    "fsdp backward": "FSDP2 waits for each reduction on the CPU",
}


MISSING = "-"  # in place of a digest: the module is there, and has no such name

# By digest, the releases in which a function has it.
Releases = dict[str, frozenset[str]]


def _read() -> dict[str, dict[str, Releases]]:
    text = Path(__file__).with_name("known_sources.json").read_text(encoding="utf-8")
    return {feature: _of_feature(feature, json.loads(text)) for feature in PLACES}


def _of_feature(feature: str, recorded: Mapping[str, Any]) -> dict[str, Releases]:
    support = versions.SUPPORT[feature]
    assert support.read is not None
    oldest, newest = map(versions.order, support.read)
    all_releases: Sequence[str] = recorded["releases"][support.library]
    read = [v for v in all_releases if oldest <= versions.order(v) <= newest]
    places: dict[str, Releases] = {}
    for place in PLACES[feature]:
        releases: dict[str, set[str]] = {}
        for found, first, last in recorded["digests"][place]:
            since = versions.order(first), versions.order(last)
            releases.setdefault(found, set()).update(
                v for v in read if since[0] <= versions.order(v) <= since[1]
            )
        places[place] = {found: frozenset(of) for found, of in releases.items() if of}
    return places


# Feature -> place -> digest -> releases.
READ = _read()


@cache
def known(feature: str) -> bool:
    """Whether ``feature`` may replace its functions; if not, the first call logs why."""
    if feature in _SWITCHED and not switched_on():
        return False
    reason = refusal(feature)
    if reason is not None:
        step_back(feature, reason)
    return reason is None


def switched_on() -> bool:
    """False if ``SMDDP_ZERO_PATHS=0`` asks for DeepSpeed's own paths."""
    return os.environ.get(SWITCH) != "0"


def refusal(feature: str) -> str | None:
    """The first function that is not one of those that were read together, or None."""
    together: frozenset[str] | None = None
    for place, read in READ[feature].items():
        module, _, name = place.partition(":")
        try:
            found = digest(module, name)
        except LookupError:
            found = MISSING
        except (ImportError, OSError, SyntaxError):
            return f"the source of {module} of {versions.installed(feature)} can't be read"
        releases = read.get(found, frozenset())
        together = releases if together is None else together & releases
        if not together and found == MISSING:
            return f"{versions.installed(feature)} has no {module}.{name}"
        if not together:
            return f"{module}.{name} of {versions.installed(feature)} is not one this package knows"
    return None


def step_back(feature: str, reason: str) -> None:
    """Says, once, why ``feature`` leaves the work to the library."""
    settings.warn_once(
        f"upstream {feature}",
        f"smddp: {_CONSEQUENCE[feature]}, as {reason}; the results are the same",
    )


def digest(module: str, name: str) -> str:
    """A digest of the source of a module's class or function, without comments and indentation.

    Nothing is imported.

    Raises:
        ImportError: there is no such module.
        OSError: the module's source is not available.
        LookupError: there is no such name in it.
    """
    return digest_of(*_parsed(module), name)


def digest_of(text: str, tree: ast.Module, name: str) -> str:
    """The same, of the text of a module and its tree.

    Raises:
        LookupError: there is no such name in it.
    """
    body, first, last = tree.body, 0, 0
    for part in name.split("."):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part:
                body, first, last = node.body, node.lineno, node.end_lineno or node.lineno
                break
        else:
            raise LookupError(f"there is no {name}")
    lines = (line.strip() for line in text.splitlines()[first - 1 : last])
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


@cache
def _parsed(module: str) -> tuple[str, ast.Module]:
    library, *rest = module.split(".")
    spec = find_spec(library)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                return text, ast.parse(text)
    raise ImportError(f"there is no module {module}")
