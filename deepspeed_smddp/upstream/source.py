"""Whether functions of DeepSpeed and torch are the ones that were read for a feature.

A replacement rests on what the functions around it do. This file lists those of each feature, with
a digest of the source that was read. If one differs, the library's own path stays, and one warning
says why.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
from functools import cache
from importlib import import_module

from deepspeed_smddp import settings
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

# Feature -> module:name -> digest of its source in the version that versions.SUPPORT says.
READ: dict[str, dict[str, str]] = {
    "gather": {
        f"{_PARAMETERS}:AllGatherCoalescedHandle": "349a5baf86c73afb",
        f"{_PARAMETERS}:Init._convert_to_deepspeed_param": "08e0dcc2cd2c8c43",
        f"{_PARAMETERS}:Init._all_gather": "6c7d45f27b4434c9",
        f"{_PARAMETERS}:Init._allgather_params_coalesced": "3d805b76dca150c0",
        _REGISTRY: "ad3b30d33f25afa6",
        f"{_COORDINATOR}._fetch_sub_module_impl": "3b7a773294fdaccc",
        f"{_COORDINATOR}.__all_gather_params_": "bd65ca6be1540d54",
    },
    "reduce": {
        f"{_COLLECTIVES}:reduce_scatter_coalesced": "77ff474e10e5bad0",
        f"{_STAGE3}.__reduce_and_partition_ipg_grads": "42588ce89bf07fe6",
        f"{_STAGE3}.__avg_scatter_grads": "25adf1fd35aeb308",
        f"{_STAGE3}.partition_grads": "5be6076a43776b4e",
    },
    "overlap": {
        f"{_COLLECTIVES}:reduce_scatter_coalesced": "77ff474e10e5bad0",
        "deepspeed.runtime.zero.stage3:IPGBucketZ3": "dba63f835961cc6b",
        f"{_STAGE3}.__add_grad_to_ipg_bucket": "068acaa221712620",
        f"{_STAGE3}.reduce_independent_p_g_buckets_and_remove_grads": "0ed674e641cb0480",
        f"{_STAGE3}.__reduce_and_partition_ipg_grads": "42588ce89bf07fe6",
        f"{_STAGE3}.__avg_scatter_grads": "25adf1fd35aeb308",
        f"{_STAGE3}.partition_grads": "5be6076a43776b4e",
        f"{_STAGE3}.independent_gradient_partition_epilogue": "6e7985344eba7b7a",
        f"{_STAGE3}._pre_step": "cff910fadf3d7004",
    },
    "bucket sizes": {"deepspeed.runtime.zero.config:get_zero_config": "d5a3dd19580ff27c"},
    "comms log": {
        "deepspeed.utils.comms_logging:calc_bw_log": "8c68922ecc78094c",
        "deepspeed.utils.comms_logging:CommsLogger.append": "9d0968189a6eff92",
        "deepspeed.comm.comm:timed_op": "d707a652014ac713",
        "deepspeed.comm.utils:get_msg_size_from_args": "07005526596027c9",
    },
    "monitor": {
        "deepspeed.monitor.monitor:MonitorMaster": "e9d21abb15668764",
        f"{_ENGINE}._take_model_step": "468476ce9cfed9c4",
        f"{_ENGINE}.steps_per_print": "a9fd01b688d8c599",
    },
    "fsdp backward": {
        f"{_FSDP}._fsdp_collectives:foreach_reduce": "18035a2b90ea2724",
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward": "af80d905ca6e9833",
        f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback": "e3f83e17634cc0ff",
    },
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
    """The first function that is missing or differs from the one that was read, or None."""
    for place, read in READ[feature].items():
        module, _, name = place.partition(":")
        try:
            found = digest(module, name)
        except (ImportError, OSError, LookupError, SyntaxError):
            return f"{versions.installed(feature)} has no {module}.{name} whose source can be read"
        if found != read:
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

    Raises:
        ImportError: there is no such module.
        OSError: the module's source is not available.
        LookupError: there is no such name in it.
    """
    text, tree = _parsed(module)
    body, first, last = tree.body, 0, 0
    for part in name.split("."):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part:
                body, first, last = node.body, node.lineno, node.end_lineno or node.lineno
                break
        else:
            raise LookupError(f"{module} has no {name}")
    lines = (line.strip() for line in text.splitlines()[first - 1 : last])
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


@cache
def _parsed(module: str) -> tuple[str, ast.Module]:
    text = inspect.getsource(import_module(module))
    return text, ast.parse(text)
