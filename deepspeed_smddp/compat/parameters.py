"""The JSON dictionaries of ``smdistributed.modelparallel`` and of ``torch.sagemaker``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepspeed_smddp.compat import refuse
from deepspeed_smddp.config.fields import nearest
from deepspeed_smddp.config.kinds import whole
from deepspeed_smddp.errors import SmddpConfigError

# A job's launcher sets this variable; it has precedence over the values that a script passes.
VARIABLE = "SM_HP_MP_PARAMETERS"


_Degree = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0), BeforeValidator(whole)]
_Parameters = TypeVar("_Parameters", bound="Parameters")


class Parameters(BaseModel):
    """Base of both dictionaries; refuses unknown keys and wrong values."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # Parameters that have no effect here.
    idle: ClassVar[tuple[str, ...]] = ()
    # Those that are refused if they are true or above 1: what they ask for, and a replacement.
    unsupported: ClassVar[dict[str, tuple[str, str]]] = {}

    def check(self) -> None:
        """Raises Unsupported, or SmddpConfigError for parameters that exclude one another."""
        for key, (what, instead) in self.unsupported.items():
            value = getattr(self, key)
            if value is True or value > 1:
                refuse(what, instead)


_PIPELINE = (
    "pipeline parallelism",
    'set "pipeline_parallel_degree" and "partitions" to 1 and shard the model with '
    '"sharded_data_parallel_degree"',
)


class ModelParallelParameters(Parameters):
    """The parameters of ``smdistributed.modelparallel.torch``, with its defaults."""

    # These control how layers are placed in a pipeline; there is no pipeline here.
    idle = (
        *("active_microbatches", "auto_partition", "contiguous", "default_partition", "fast_mode"),
        *("horovod", "memory_weight", "optimize", "pipeline", "placement_strategy"),
        *("skip_tracing", "static_mode"),
    )
    unsupported = {
        "partitions": _PIPELINE,
        "pipeline_parallel_degree": _PIPELINE,
        "tensor_parallel_degree": (
            "tensor parallelism under smdistributed.modelparallel",
            'set "tensor_parallel_degree" to 1 and shard with "sharded_data_parallel_degree", or '
            'use DeepSpeed\'s "tensor_parallel": {"autotp_size": ...}',
        ),
        "delayed_parameter_initialization": (
            "delayed parameter initialisation under smdistributed.modelparallel",
            'leave out "delayed_parameter_initialization", or build the model under '
            "deepspeed.zero.Init",
        ),
    }

    ddp: bool = False
    ddp_port: int | None = None
    ddp_dist_backend: str = "auto"
    microbatches: _Degree = 1
    fp16: bool = False
    bf16: bool = False
    prescaled_batch: bool = False
    shard_optimizer_state: bool = False
    sharded_data_parallel_degree: _Degree = 1
    sdp_reduce_bucket_size: _Count = 500_000_000
    sdp_param_persistence_threshold: _Count = 1_000_000
    sdp_max_live_parameters: _Count = 1_000_000_000
    sdp_hierarchical_allgather: bool = True
    sdp_gradient_clipping: float = Field(1.0, ge=0)
    offload_activations: bool = False
    activation_loading_horizon: _Degree = 4
    partitions: _Degree = 1
    pipeline_parallel_degree: _Degree = 1
    tensor_parallel_degree: _Degree = 1
    tensor_parallel_seed: int = 0
    delayed_parameter_initialization: bool = False

    def check(self) -> None:
        """Raises Unsupported, or SmddpConfigError for parameters that exclude one another."""
        super().check()
        if self.fp16 and self.bf16:
            raise SmddpConfigError('"fp16" and "bf16" are both true, but only one of them may be')
        if self.sharded_data_parallel_degree > 1 and self.shard_optimizer_state:
            raise SmddpConfigError(
                '"shard_optimizer_state" can\'t be combined with "sharded_data_parallel_degree", '
                "which shards the optimizer state already; leave out one of the two"
            )

    def ds_config(self, accumulation: int) -> dict[str, Any]:
        """The DeepSpeed config of an engine with ``accumulation`` micro-batches per step."""
        stage = 3 if self.sharded_data_parallel_degree > 1 else int(self.shard_optimizer_state)
        config: dict[str, Any] = {
            # The script makes the batches; DeepSpeed needs only their number per step.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000_000,
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": self.sdp_reduce_bucket_size,
            },
        }
        if stage == 3:
            config["smddp"] = {"sharded_data_parallel_degree": self.sharded_data_parallel_degree}
            config["gradient_clipping"] = self.sdp_gradient_clipping
            config["zero_optimization"] |= {
                "stage3_param_persistence_threshold": self.sdp_param_persistence_threshold,
                "stage3_max_live_parameters": self.sdp_max_live_parameters,
            }
        if self.fp16:
            config["fp16"] = {"enabled": True}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        return config


class SageMakerParameters(Parameters):
    """The parameters of ``torch.sagemaker``, with its defaults."""

    unsupported = {
        "context_parallel_degree": (
            "context parallelism",
            'set "context_parallel_degree" to 1, or use DeepSpeed\'s Ulysses (deepspeed.sequence) '
            "over smddp",
        ),
        "expert_parallel_degree": (
            "expert parallelism",
            'set "expert_parallel_degree" to 1, or use DeepSpeed\'s MoE layer '
            "(deepspeed.moe.layer.MoE) over smddp",
        ),
    }

    hybrid_shard_degree: _Count = 0
    sm_activation_offloading: bool = True
    activation_loading_horizon: _Degree = 2
    fsdp_cache_flush_warnings: bool = True
    allow_empty_shards: bool = False
    tensor_parallel_degree: _Degree = 1
    tensor_parallel_seed: int = 0
    context_parallel_degree: _Degree = 1
    expert_parallel_degree: _Degree = 1
    random_seed: int = 12345

    @property
    def seed(self) -> int:
        """Seed of the random numbers that differ between the ranks of a tensor-parallel group."""
        asked = "tensor_parallel_seed" in self.model_fields_set
        return self.tensor_parallel_seed if asked else self.random_seed


def read(
    kind: type[_Parameters], given: str | os.PathLike[str] | Mapping[str, Any] | None
) -> _Parameters:
    """The parameters that apply; ``SM_HP_MP_PARAMETERS`` has precedence over the script's.

    Args:
        kind: which of the two dictionaries.
        given: a dictionary, the path of a JSON file with one, or None.

    Raises:
        SmddpConfigError: a file or the variable holds no JSON dictionary, an unknown key, or a
            value that its key may not hold.
        Unsupported: no adapter supports the value.
    """
    if isinstance(given, (str, os.PathLike)):
        place = os.fspath(given)
        try:
            with open(place) as file:
                given = _dictionary(file.read(), f"the file {place}")
        except OSError as error:
            raise SmddpConfigError(f"the file {place} cannot be read: {error.strerror}") from error
    found = {**(given or {}), **_dictionary(os.environ.get(VARIABLE) or "{}", VARIABLE)}
    try:
        parameters = kind.model_validate({k: v for k, v in found.items() if k not in kind.idle})
    except ValidationError as error:
        raise SmddpConfigError(_sentence(kind, error)) from None
    parameters.check()
    return parameters


def _dictionary(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SmddpConfigError(f"{place} holds no JSON: {error}") from None
    if not isinstance(found, dict):
        raise SmddpConfigError(f"{place} holds {found!r}, but may hold a JSON dictionary")
    return found


def _sentence(kind: type[Parameters], error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        guess = nearest(key, [*kind.model_fields, *kind.idle])
        hint = f'; did you mean "{guess}"?' if guess else ""
        return f'the parameter "{key}" is not known{hint}'
    return f'the parameter "{key}" is {first["input"]!r}: {first["msg"]}'
