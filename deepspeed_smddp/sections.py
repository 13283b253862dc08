"""The keys of the "smddp" section of a DeepSpeed config, and what each may hold.

``config`` parses the section by these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StrictBool

MIN_BUCKET_BYTES = 4096


def _whole(value: Any) -> Any:
    # JSON and hjson read 5e8 as a float; DeepSpeed accepts that for a count, and so does this.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


_Bytes = Annotated[int, Field(strict=True, ge=MIN_BUCKET_BYTES, le=1 << 62)]
_Bucket = Annotated[Literal["auto"] | _Bytes, BeforeValidator(_whole)]
_Count = Annotated[int, Field(strict=True, ge=0, le=1 << 31), BeforeValidator(_whole)]
_Positive = Annotated[int, Field(strict=True, ge=1, le=1 << 31), BeforeValidator(_whole)]
_SecondsOrNone = Annotated[float, Field(strict=True, ge=0, le=1e9), BeforeValidator(_number)]
_Seconds = Annotated[float, Field(strict=True, gt=0, le=1e9), BeforeValidator(_number)]

_FILE = "the name of a file, with {rank} and {host} in it if wanted, or an empty text for none"
_BUCKET_HOLDS = f'"auto" or a number of bytes of at least {MIN_BUCKET_BYTES}'


ROUTES = ("smddp", "fallback", "nccl", "gloo", "auto")
_ROUTE_HOLDS = (
    '"smddp", "nccl", "gloo", "fallback" (either), "auto", or a list of '
    '{"up_to": bytes, "path": one of these} in rising order, of which the last may have no "up_to"'
)


def _route(value: Any) -> tuple[tuple[int, str], ...]:
    """Steps: bytes at most (0: no bound), and the path. A single path is one step."""
    if isinstance(value, str):
        value = [{"path": value}]
    steps = [_route_step(step) for step in value] if isinstance(value, list | tuple) else []
    bounds = [bound for bound, _ in steps]
    paths = {path for _, path in steps}
    # "auto" finds bounds itself.
    if not steps or 0 in bounds[:-1] or ("auto" in paths and len(steps) > 1):
        raise ValueError(_ROUTE_HOLDS)
    bounded = [bound for bound in bounds if bound]
    if bounded != sorted(set(bounded)):
        raise ValueError(_ROUTE_HOLDS)
    return tuple(steps)


def _route_step(step: Any) -> tuple[int, str]:
    if isinstance(step, dict) and set(step) <= {"up_to", "path"} and "path" in step:
        bound, path = _whole(step.get("up_to", 0)), step["path"]
        allowed = "up_to" not in step or (isinstance(bound, int) and bound > 0)
    elif isinstance(step, list | tuple) and len(step) == 2:
        bound, path = step
        allowed = isinstance(bound, int) and bound >= 0
    else:
        raise ValueError(_ROUTE_HOLDS)
    if not allowed or path not in ROUTES or bound >= 1 << 62:
        raise ValueError(_ROUTE_HOLDS)
    return bound, path


_Route = Annotated[tuple[tuple[int, str], ...], PlainValidator(_route)]
_SMDDP = ((0, "smddp"),)


class Section(BaseModel):
    """What the section and its sub-sections share: no unknown keys, no changes."""

    # The description of a field completes the sentence "<key> is ..., but may hold ...".
    model_config = ConfigDict(extra="forbid", frozen=True)


class ActivationOffload(Section):
    """``smddp.activation_offload``: activations are in host memory until the backward pass."""

    enabled: StrictBool = Field(False, description="true or false")
    horizon: _Positive = Field(2, description="a number of layers of at least 1")
    directory: str = Field(
        "", description="a directory to map host memory from, or an empty text for none"
    )


class Ledger(Section):
    """``smddp.ledger``: where the counters of :func:`deepspeed_smddp.statistics` are written."""

    table: StrictBool = Field(False, description="true or false")
    json_file: str = Field("", description=_FILE)
    json_lines: str = Field("", description=_FILE)
    prometheus_file: str = Field("", description=_FILE)
    interval_seconds: _SecondsOrNone = Field(
        0.0, description="a number of seconds, or 0 to write only when the process ends"
    )
    monitor: StrictBool = Field(True, description="true or false")


class Routes(Section):
    """``smddp.routes``: who carries which sizes of a collective, in bytes of all ranks' data."""

    all_gather: _Route = Field(_SMDDP, description=_ROUTE_HOLDS)
    reduce_scatter: _Route = Field(_SMDDP, description=_ROUTE_HOLDS)
    all_reduce: _Route = Field(_SMDDP, description=_ROUTE_HOLDS)


class SmddpConfig(Section):
    """The "smddp" section of a DeepSpeed config (JSON or hjson). Every key is optional."""

    allgather_bucket_size: _Bucket = Field("auto", description=_BUCKET_HOLDS)
    reduce_scatter_bucket_size: _Bucket = Field("auto", description=_BUCKET_HOLDS)
    sharded_data_parallel_degree: _Count = Field(
        0, description="0 (all ranks) or the number of ranks that share one copy of the state"
    )
    tensor_parallel_degree: _Positive = Field(
        1, description="the number of ranks that divide each layer, at least 1"
    )
    tensor_parallel_seed: _Count = Field(
        0, description="a number of at least 0, a seed for the random values of divided layers"
    )
    hierarchical_allgather: StrictBool = Field(True, description="true or false")
    max_sms: _Count = Field(9, description="a number of streaming multiprocessors")
    check_first_use: StrictBool = Field(True, description="true or false")
    reduce_on: Literal["gpu", "cpu"] = Field("gpu", description='"gpu" or "cpu"')
    reduce_precision: Literal["wire", "fp32"] = Field("wire", description='"wire" or "fp32"')
    fallback: Literal["warn", "silent", "error"] = Field(
        "warn", description='"warn", "silent" or "error"'
    )
    routes: Routes = Field(
        default_factory=Routes, description='{"all_gather": "smddp", "reduce_scatter": "auto"}'
    )
    timeout_seconds: _Seconds = Field(600.0, description="a number of seconds above 0")
    silence_seconds: _SecondsOrNone = Field(
        30.0, description="a number of seconds, or 0 to wait until the deadline"
    )
    slow_seconds: _SecondsOrNone = Field(
        60.0, description="a number of seconds, or 0 to name no slow rank or link"
    )
    activation_offload: ActivationOffload = Field(
        default_factory=ActivationOffload, description='{"enabled": false, "horizon": 2}'
    )
    ledger: Ledger = Field(
        default_factory=Ledger, description='{"table": true, "json_file": "counters.json"}'
    )
