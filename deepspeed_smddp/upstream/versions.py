"""What each feature rests on in DeepSpeed or torch, and which versions it supports.

One table for the package. A feature that rests on more of another library supports fewer of its
versions.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Support:
    """The versions of one library that a feature supports, by one of two rules.

    Args:
        minors: the oldest and the newest (major, minor) version, both supported.
        read: the oldest and the newest release whose functions were read, like all releases
            between them. A version is supported if the sources of these functions have the digests
            that they have together in one of these releases (``upstream.source``).
        places: these functions and classes, as module:name, or whole modules, as module: alone;
            one may be missing in some versions.
        otherwise: what happens with a version that has others.
        library: its name in sentences; in lower case the name of its module.
    """

    minors: tuple[tuple[int, int], tuple[int, int]] | None = None
    read: tuple[str, str] | None = None
    places: tuple[str, ...] = ()
    otherwise: str = ""
    library: str = "DeepSpeed"


_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_COORDINATING = "deepspeed.runtime.zero.partitioned_param_coordinator"
_COORDINATOR = f"{_COORDINATING}:PartitionedParameterCoordinator"
_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_REDUCE_SCATTER = "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced"
_FSDP = "torch.distributed.fsdp._fully_shard"
_SINCE_16 = ("0.16.0", "0.19.8")

SUPPORT: dict[str, Support] = {
    # Wraps public functions, and checks their signatures as well.
    "comm_backend": Support(minors=((0, 14), (0, 19))),
    # Rest on stage 3, the engine and the process groups in many places.
    "sharded_data_parallel_degree": Support(
        read=("0.19.8", "0.19.8"),
        places=(
            "deepspeed.runtime.engine:",
            "deepspeed.runtime.zero.parameter_offload:",
            "deepspeed.runtime.zero.partition_parameters:",
            "deepspeed.runtime.zero.stage3:",
            "deepspeed.utils.groups:",
        ),
    ),
    "tensor_parallel_degree": Support(
        read=("0.19.8", "0.19.8"),
        places=(
            "deepspeed:",
            "deepspeed.module_inject.auto_tp:",
            "deepspeed.runtime.config:",
            "deepspeed.runtime.engine:",
            "deepspeed.utils.groups:",
        ),
    ),
    # Replace single functions, or call them.
    "gather": Support(
        read=_SINCE_16,
        places=(
            f"{_PARAMETERS}:free_param",
            f"{_PARAMETERS}:AllGatherCoalescedHandle",
            f"{_PARAMETERS}:Init._convert_to_deepspeed_param",
            f"{_PARAMETERS}:Init._all_gather",
            f"{_PARAMETERS}:Init._allgather_params_coalesced",
            f"{_COORDINATING}:InflightParamRegistry",
            f"{_COORDINATOR}.fetch_sub_module",
            f"{_COORDINATOR}._fetch_sub_module_impl",
            f"{_COORDINATOR}.__all_gather_params_",
        ),
        otherwise="ZeRO-3 gathers parameters the way DeepSpeed does, with copies",
    ),
    "reduce": Support(
        read=_SINCE_16,
        places=(
            _REDUCE_SCATTER,
            f"{_STAGE3}.__reduce_and_partition_ipg_grads",
            f"{_STAGE3}.__avg_scatter_grads",
            f"{_STAGE3}.partition_grads",
        ),
        otherwise="ZeRO-3 reduces gradients the way DeepSpeed does, with copies",
    ),
    "overlap": Support(
        read=("0.17.3", "0.19.8"),  # before, one bucket whose counter of elements is not reset
        places=(
            _REDUCE_SCATTER,
            "deepspeed.runtime.zero.stage3:IPGBucketZ3",
            f"{_STAGE3}.__add_grad_to_ipg_bucket",
            f"{_STAGE3}.reduce_independent_p_g_buckets_and_remove_grads",
            f"{_STAGE3}.__reduce_and_partition_ipg_grads",
            f"{_STAGE3}.__avg_scatter_grads",
            f"{_STAGE3}.partition_grads",
            f"{_STAGE3}.independent_gradient_partition_epilogue",
            f"{_STAGE3}._pre_step",
        ),
        otherwise="ZeRO-3 waits for each bucket of gradients on the CPU, as DeepSpeed does",
    ),
    "bucket sizes": Support(
        read=_SINCE_16,
        places=("deepspeed.runtime.zero.config:get_zero_config",),
        otherwise='sizes that "zero_optimization" leaves open stay at DeepSpeed\'s defaults',
    ),
    "comms log": Support(
        read=_SINCE_16,
        places=(
            "deepspeed.utils.comms_logging:calc_bw_log",
            "deepspeed.utils.comms_logging:CommsLogger.append",
            "deepspeed.comm.comm:timed_op",
            "deepspeed.comm.utils:get_msg_size_from_args",
        ),
        otherwise="with comms_logger, ZeRO-3 gathers and reduces the way DeepSpeed does",
    ),
    "monitor": Support(
        read=_SINCE_16,
        places=(
            "deepspeed.monitor.monitor:MonitorMaster",
            f"{_ENGINE}._take_model_step",
            f"{_ENGINE}.steps_per_print",
        ),
        otherwise="DeepSpeed's monitor gets no counters of smddp",
    ),
    "fsdp backward": Support(
        read=("2.11.0", "2.15.0"),
        places=(
            f"{_FSDP}._fsdp_collectives:foreach_reduce",
            f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward",
            f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback",
        ),
        otherwise="FSDP2 waits for each reduction on the CPU",
        library="torch",
    ),
    # Wraps a public function, and checks its signature.
    "split_group": Support(minors=((2, 11), (2, 15)), library="torch"),
}


def order(version: str) -> tuple[int, ...]:
    """A key that sorts versions: the numbers of the release."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def version(library: str) -> str | None:
    """The version of a library; None if it is not known."""
    found = getattr(sys.modules.get(library.lower()), "__version__", None)
    try:
        return str(found or metadata.version(library.lower()))
    except metadata.PackageNotFoundError:  # a source tree, or not installed
        return None


def installed(library: str) -> str:
    """The name and version of a library."""
    number = version(library)
    return f"this {library}" if number is None else f"{library} {number}"
